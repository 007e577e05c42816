"""A directory that does not answer, such as one of a network file system whose server is gone: one
request waits for it for a bounded time, nobody else does, and what it says later does no harm."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from milepost.cache import Lost
from milepost.tiers import disk as disk_module
from milepost.tiers import finding
from milepost.tiers.files import Files
from milepost.tiers.holdings import MeasuredRates
from tests.engines import NUM_TOKENS, THREE_LAYERS, answer, ask, save_tiny, tiering_of, tokens

END = 300 + NUM_TOKENS - 1
WAIT_S = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_5", torch.float64, **THREE_LAYERS)


class Gate:
    """While it is closed, what goes through it does not return."""

    def __init__(self):
        self._is_open = threading.Event()
        self.num_held = 0
        self.close()

    def close(self):
        self._is_open.clear()

    def open(self):
        self._is_open.set()

    def hold(self, monkeypatch, name):
        """Have this operation on files go through it."""
        call = getattr(Files, name)

        def held(*given):
            self.num_held += not self._is_open.is_set()
            assert self._is_open.wait(WAIT_S)
            return call(*given)

        monkeypatch.setattr(Files, name, held)


@pytest.fixture
def gate(monkeypatch):
    for name, value in (("STALL_S", 0.05), ("IDLE_STALL_S", 0.05), ("LATE", 0.0)):
        monkeypatch.setattr(disk_module, name, value)
    gate = Gate()
    yield gate
    gate.open()


def opened(tiny, folder):
    llm = tiny.open(num_pages=14, num_slots=4, max_num_seqs=3, cache_dir=str(folder))
    tiers = tiering_of(llm.llm_engine).tiers
    tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)  # nothing is worth computing
    return llm, tiering_of(llm.llm_engine), tiers


def written(tiny, folder, *prompts):
    """An engine's answers to prompts, all of which it has brought to disk."""
    llm, *_ = opened(tiny, folder)
    outputs = ask(llm, *prompts)
    llm.llm_engine.close()
    return outputs


def follow_up(output):
    return [*output.prompt_token_ids, *answer(output), *tokens(30, seed=99)]


def tend_until(tiering, is_so):
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "that takes too long"
        tiering.do_idle_work()
        time.sleep(0.001)


def said(caplog, words):
    return sum(words in line for line in caplog.messages)


def num_places_taken(tiers):
    return sum(places.num_used for places in tiers.host.budgets.values())


def test_a_read_that_does_not_return_is_computed_instead(tiny, tmp_path, gate, monkeypatch, caplog):
    firsts = written(tiny, tmp_path, tokens(300), tokens(300, seed=5))
    llm, tiering, tiers = opened(tiny, tmp_path)
    gate.hold(monkeypatch, "read")
    outputs = ask(llm, follow_up(firsts[0]))
    assert gate.num_held > 0
    assert outputs[0].cache_report.lost[Lost.LATE_COPY] == END
    stats = tiers.stats
    assert (stats.loads, stats.failed_loads, stats.disk_rests) == (1, 1, 1)
    outputs += ask(llm, follow_up(firsts[1]), tokens(300, seed=6))
    assert outputs[1].cache_report.lost[Lost.LATE_COPY] == END
    assert stats.loads == 1, "nobody else waits for it"
    assert not tiering.transfers.is_writing, "nor does an engine that has nothing else to do"
    assert said(caplog, "does not answer") == 1

    tiering.reset(with_files=False)
    assert num_places_taken(tiers) > 0, "the read may still write there"
    gate.open()
    tend_until(tiering, lambda: not tiers.holdings.disk_rests)
    assert num_places_taken(tiers) == 0
    assert len(tiers.host) == 0, "what came late is thrown away"
    assert said(caplog, "answers again") == 1
    assert llm.llm_engine.scheduler.cache.reset()
    outputs += ask(llm, follow_up(firsts[1]))
    assert outputs[-1].cache_report.loaded == {"disk": END}
    tiny.check(outputs)


def test_writes_that_do_not_return_hold_up_nothing(tiny, tmp_path, gate, monkeypatch, caplog):
    gate.hold(monkeypatch, "write")
    llm, tiering, tiers = opened(tiny, tmp_path)
    outputs = ask(llm, tokens(300))
    tend_until(tiering, lambda: tiers.holdings.disk_rests)
    disk = tiering.transfers._disk
    assert len(disk._writing) == gate.num_held == 1, "those that have not begun wait elsewhere"
    assert sum(item.pins for item in tiers.host) == 1
    for seed in range(3):
        outputs += ask(llm, tokens(200, seed))
    assert disk._writer._jobs.qsize() <= disk_module.MAX_WRITES, "cancelled ones, and no others"
    assert said(caplog, "does not answer") == 1
    gate.open()
    tend_until(tiering, lambda: tiers.stats.written > 10 and not tiering.do_idle_work())
    assert not any(item.pins for tier in (tiers.host, tiers.disk) for item in tier)
    (again,) = ask(opened(tiny, tmp_path)[0], follow_up(outputs[0]))
    assert again.cache_report.loaded == {"disk": END}, "what was put off is written"
    tiny.check([*outputs, again])


def test_an_engine_ends_though_a_write_does_not(tiny, tmp_path, gate, monkeypatch):
    gate.hold(monkeypatch, "write")
    llm, *_ = opened(tiny, tmp_path)
    ask(llm, tokens(300))
    llm.llm_engine.close()
    assert gate.num_held == 1


@pytest.mark.parametrize("name", ["look", "make"])
def test_an_engine_starts_though_the_directory_does_not_answer(
    tiny, tmp_path, gate, monkeypatch, caplog, name
):
    (first,) = written(tiny, tmp_path, tokens(300))
    monkeypatch.setattr(finding, "SCAN_S", 0.01)
    monkeypatch.setattr("milepost.engine.assembly.tiering.MAKE_S", 0.01)
    gate.hold(monkeypatch, name)
    llm, tiering, tiers = opened(tiny, tmp_path)
    outputs = []
    if name == "look":
        assert not len(tiers.disk)
        tend_until(tiering, lambda: tiers.holdings.disk_rests)
        outputs += ask(llm, follow_up(first))
        assert not tiering.transfers.is_writing
    assert gate.num_held == said(caplog, "does not answer") == 1
    gate.open()
    tend_until(tiering, lambda: not tiers.holdings.disk_rests and len(tiers.disk))
    tend_until(tiering, lambda: not tiering.do_idle_work())
    assert llm.llm_engine.scheduler.cache.reset()
    tiering.reset(with_files=False)
    outputs += ask(llm, follow_up(first))
    assert outputs[-1].cache_report.loaded["disk"] >= END
    tiny.check(outputs)


def test_a_process_ends_though_a_thread_does_not():
    code = (
        "import threading; from milepost.tiers.threads import Threads;"
        "begun = threading.Event(); threads = Threads(1, 'hung');"
        "threads.submit(lambda: (begun.set(), threading.Event().wait()));"
        "begun.wait(); threads.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
