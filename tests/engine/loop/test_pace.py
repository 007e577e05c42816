"""When the step after one in flight is planned."""

import socket
import threading

import pytest

from milepost.cache import Cache
from milepost.engine.loop.pipeline import Pace
from milepost.engine.processes import engine as process
from milepost.engine.processes.engine import Loop
from milepost.engine.processes.pixels import SentPixels
from milepost.engine.processes.wire import Ask, Stop, frame
from milepost.runner.recording import PictureRecord
from milepost.scheduler.plans import SequencePlan, StepPlan
from milepost.scheduler.scheduler import Scheduler


def plan(*lengths):
    return StepPlan(
        sequences=tuple(
            SequencePlan(
                number=number,
                start=0,
                num_tokens=length,
                tokens=b"",
                new_pages=(),
                write_from=0,
                slot_in=0,
                slot_out=number + 1,
                samples=True,
            )
            for number, length in enumerate(lengths)
        )
    )


def spare_s(pace, *lengths, elapsed_s=0.0, will_prefill=False):
    return pace.spare_s(plan(*lengths), elapsed_s, will_prefill=will_prefill)


def test_a_size_that_was_not_seen_is_planned_after_at_once():
    pace = Pace()
    pace.note_step(plan(1, 1, 1), 0.01)
    assert spare_s(pace, 1, 1, 1, 1) == 0.0
    assert spare_s(pace, 1, 300) == 0.0
    assert 0.009 < spare_s(pace, 1, 1) < 0.01, "a margin is left"


def test_what_has_passed_of_a_step_and_what_planning_takes_are_not_to_spare():
    pace = Pace()
    pace.note_step(plan(300, 1), 0.02)
    whole = spare_s(pace, 400, 1)
    assert spare_s(pace, 400, 1, elapsed_s=0.005) == pytest.approx(whole - 0.005)
    assert spare_s(pace, 400, 1, elapsed_s=0.03) == 0.0
    pace.note_planning(plan(1, 1), 0.001, is_late=False)
    pace.note_planning(plan(300, 1), 0.004, is_late=False)
    assert spare_s(pace, 400, 1) == pytest.approx(whole - 0.001)
    assert spare_s(pace, 400, 1, will_prefill=True) == pytest.approx(whole - 0.004)


def test_a_short_step_and_a_long_plan_count_until_many_others_have_come():
    pace, others = Pace(), Pace()
    for each, seconds in ((pace, (0.02, 0.01, 0.02)), (others, (0.02,))):
        for taken in seconds:
            each.note_step(plan(1), taken)
    usual = spare_s(others, 1)
    short = spare_s(pace, 1)
    assert short < usual - 0.008
    pace.note_planning(plan(1), 0.008, is_late=False)
    pace.note_planning(plan(1), 0.001, is_late=False)
    assert spare_s(pace, 1) < short - 0.005
    for _ in range(40):
        pace.note_step(plan(1), 0.02)
        pace.note_planning(plan(1), 0.001, is_late=False)
    assert spare_s(pace, 1) == pytest.approx(usual - 0.001)


def test_a_device_that_ran_out_of_work_is_given_it_earlier():
    pace = Pace()
    pace.note_step(plan(1), 0.1)
    found = [spare_s(pace, 1)]
    for _ in range(20):
        pace.note_planning(plan(1), 0.0, is_late=True)
        found.append(spare_s(pace, 1))
    assert found[0] > found[1] > found[2]
    assert found == sorted(found, reverse=True)
    assert found[-1] == found[-2] > 0.05, "but no earlier than helps"
    for _ in range(400):
        pace.note_planning(plan(1), 0.0, is_late=False)
    assert spare_s(pace, 1) == pytest.approx(found[0])


class Busy:
    """An engine with a step in flight. Whenever somebody asks how long that still takes, a client
    asks for something soon after; after the third time nothing comes, and then the time is over.
    """

    wakers = ()
    has_work, awaits_others = True, False
    facts = None

    def __init__(self, client):
        cache = Cache(num_pages=4, num_slots=6, page_size=16)
        self.scheduler = Scheduler(cache, max_num_seqs=1, max_num_batched_tokens=64)
        self._client = client
        self._left = [60.0, 60.0, 60.0, 0.001, 0.0]
        self.told = []

    @property
    def spare_s(self):
        left = self._left.pop(0)
        if left > 1:
            asked = frame(Ask(id=1, what="reset_prefix_cache"))
            threading.Timer(0.02, self._client.sendall, (asked,)).start()
        return left

    def reset_prefix_cache(self):
        self.told.append("asked")
        return True

    def do_idle_work(self):
        return False

    def step(self):
        self.told.append("step")
        self._client.sendall(frame(Stop()))
        return []

    def end_late(self):
        return []


def test_what_arrives_while_a_step_runs_is_in_the_next_plan():
    """However often something comes, until there is no time left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Busy(ours)
        loop = Loop(engine, theirs)
        loop.run()
        loop.close()
    assert engine.told == ["asked", "asked", "asked", "step"]


class Stepping(Busy):
    """An engine whose steps take no time; it is told to stop after the first one that follows a
    question."""

    spare_s = 0.0

    def step(self):
        if "asked" in self.told:
            return super().step()
        self.told.append("step")
        return []


def test_running_requests_do_not_wait_for_large_pictures_to_arrive(monkeypatch):
    monkeypatch.setattr(process, "READ_BYTES", 2**10)
    monkeypatch.setattr(process, "MOST_BYTES", 2**12)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Stepping(ours)
        loop = Loop(engine, theirs)
        pixels = PictureRecord(identity=bytes(16), rows=bytes(3 * 2**12), grid=(1, 2, 2))
        for piece in SentPixels().before([pixels]):
            ours.sendall(piece)
        ours.sendall(frame(Ask(id=1, what="reset_prefix_cache")))
        loop.run()
        loop.close()
    assert engine.told == ["step", "step", "step", "asked", "step"]
