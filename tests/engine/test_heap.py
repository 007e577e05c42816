"""Memory goes back to the system when the engine has nothing to do."""

import gc
import os
import socket
import subprocess
import sys
from itertools import pairwise
from unittest.mock import Mock

import pytest

from milepost.cache import Cache
from milepost.engine import heap
from milepost.engine.loop import Engine
from milepost.engine.processes import engine as process
from milepost.engine.processes.wire import Ask, Stop, frame
from milepost.scheduler.scheduler import Scheduler


def test_giving_back_does_no_harm():
    blocks = [bytearray(200_000) for _ in range(50)]
    del blocks[::2]
    heap.give_back()
    assert all(not any(block) for block in blocks)


def test_what_is_there_before_the_first_request_is_not_collected_again():
    things = [[] for _ in range(100_000)]
    known, frozen = len(gc.get_objects()), gc.get_freeze_count()
    heap.settle()
    assert gc.get_freeze_count() - frozen > len(things)
    assert len(gc.get_objects()) < known - len(things)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_pauses_during_imports_and_is_then_as_it_was(is_enabled):
    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with heap.without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_the_operators_own_bounds_stay():
    """In the environment that a process hands on, which is the one that libraries read."""
    code = "import os; from milepost.engine import heap; heap.bound_plans(); os.system('env')"
    bounds = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    known = {name: value for name, value in os.environ.items() if name not in bounds}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=known | {"LRU_CACHE_CAPACITY": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    values = dict(line.partition("=")[::2] for line in found.splitlines())
    assert values["LRU_CACHE_CAPACITY"] == "7"
    assert int(values["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024


@pytest.fixture
def joined():
    """A loop over an engine whose steps come to nothing, the engine, and a client's socket."""
    cache = Cache(num_pages=4, num_slots=2)
    engine = Mock(spec=Engine, wakers=[], facts=None, spare_s=0.0, rest_s=None)
    engine.has_work, engine.awaits_others = True, False
    engine.scheduler = Scheduler(cache, max_num_seqs=2, max_num_batched_tokens=64)
    engine.step.return_value = engine.end_late.return_value = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = process.Loop(engine, theirs)
        yield loop, engine, ours
        loop.close()


@pytest.mark.parametrize(("waiting", "num_times"), [((), 1), ((Ask(1, "alive"), Stop()), 0)])
def test_an_engine_gives_back_once_when_nothing_comes(joined, monkeypatch, waiting, num_times):
    """After its last step, unless something waits; questions that come later are no reason."""
    loop, engine, ours = joined
    given, later = [], [Stop(), Ask(3, "alive"), Ask(2, "alive")]

    def step():
        engine.has_work = False
        for message in waiting:
            ours.sendall(frame(message))
        return []

    engine.step.side_effect = step
    engine.do_idle_work.side_effect = lambda: ours.sendall(frame(later.pop()))
    monkeypatch.setattr(process, "REST_S", 0.01)
    monkeypatch.setattr(heap, "give_back", lambda: given.append(True))
    loop.run()
    assert len(given) == num_times


def test_an_engine_that_never_rests_gives_back_once_a_minute(joined, monkeypatch):
    loop, engine, ours = joined
    given, now = [], [1000]

    def step():
        now[0] += 1
        if now[0] == 1200:
            ours.sendall(frame(Stop()))
        return []

    engine.step.side_effect = step
    monkeypatch.setattr(heap, "give_back", lambda: given.append(now[0]))
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    loop.run()
    assert len(given) == 3
    assert {later - sooner for sooner, later in pairwise(given)} == {60}
