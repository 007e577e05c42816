"""A program that ends loses nothing of its cache that is complete in memory, however it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from milepost.engine.prompts import Prompt
from milepost.errors import EngineDeadError
from milepost.tiers.files import Files
from milepost.tiers.holdings import MeasuredRates
from tests.engine import programs
from tests.engines import (
    NUM_TOKENS,
    THREE_LAYERS,
    answer,
    greedy,
    open_llm,
    prompt,
    save_tiny,
    tiering_of,
    tokens,
)

END = programs.PROMPT_LEN + NUM_TOKENS - 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny(folder, "qwen3_5", torch.float64, **THREE_LAYERS)


@pytest.fixture(scope="module")
def turns(tiny):
    """Second turns of all conversations, and what a program's first answers were."""
    with open_llm(tiny.folder, num_pages=256, num_slots=32) as llm:
        asked = [tokens(programs.PROMPT_LEN, seed) for seed in range(programs.NUM_PROMPTS)]
        outputs = llm.generate([prompt(ids) for ids in asked], greedy(), use_tqdm=False)
    return [[*output.prompt_token_ids, *answer(output), 7] for output in outputs]


def num_found(tiny, folder, way, turns) -> int:
    """How many conversations another engine finds whole on disk."""
    with open_llm(tiny.folder, **programs.options(folder, way)) as llm:
        rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)  # nothing is worth computing
        tiering_of(llm.llm_engine).tiers.holdings.rates = rates
        outputs = llm.generate([prompt(turn) for turn in turns], greedy(2), use_tqdm=False)
    return sum(output.cache_report.loaded == {"disk": END} for output in outputs)


def run(*arguments) -> list[str]:
    command = [sys.executable, "-m", "tests.engine.programs", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=250)
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["LLM", pytest.param("AsyncLLM", marks=pytest.mark.nightly)])
def test_a_program_that_ends_has_written_all(tiny, turns, tmp_path, kind):
    """By itself, by an exception, and by SIGTERM, with a request that still runs."""
    said = run(kind, tiny.folder, tmp_path, *programs.WAYS)
    assert said == [f"{way} {int(status)}" for way, status in programs.WAYS.items()]
    found = {way: num_found(tiny, tmp_path, way, turns) for way in programs.WAYS}
    assert found == dict.fromkeys(programs.WAYS, programs.NUM_PROMPTS)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM"])
@pytest.mark.parametrize("round_", range(3))
def test_a_program_that_ends_on_a_busy_machine_has_written_all(tiny, turns, tmp_path, round_, kind):
    """Beside eight processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        test_a_program_that_ends_has_written_all(tiny, turns, tmp_path, kind)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_closed_engine_takes_nothing(tiny):
    with open_llm(tiny.folder, num_pages=256) as llm:
        stream = llm.stream(prompt(tokens(40)), greedy())
        next(stream)
        thread = llm._thread._thread
    assert not thread.is_alive()
    for call in (lambda: next(stream), llm.get_metrics, lambda: llm.generate([[1, 2]], greedy())):
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            call()
    llm.close()


def test_a_closed_engine_keeps_no_memory(tiny):
    """Its caller may keep it, and open the next one."""
    llm = open_llm(tiny.folder, num_pages=256)
    llm.generate([prompt(tokens(40))], greedy(), use_tqdm=False)
    runner = llm.llm_engine.runner
    tensors = [
        *runner.executor.model.parameters(),
        *(state.conv for state in runner.pools.states.values()),
    ]
    kept = [weakref.ref(each) for each in tensors]
    del runner, tensors
    llm.close()
    gc.collect()
    assert kept
    assert not [each for each in kept if each() is not None]


def test_what_waits_for_a_closing_engine_ends(tiny, monkeypatch):
    """Here another thread's request is running when the engine is closed."""
    llm = open_llm(tiny.folder, num_pages=256)
    step, has_begun = llm.llm_engine.step, threading.Event()

    def noted():
        has_begun.set()
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", noted)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(llm.generate, [prompt(tokens(40))], greedy(4000), use_tqdm=False)
        assert has_begun.wait(60)
        llm.close()
        with pytest.raises(EngineDeadError, match="was closed"):
            running.result(60)
    assert llm.llm_engine.scheduler.cache.pages.num_used == 0


def test_time_that_is_too_short_for_writing_is_told(tiny, tmp_path, monkeypatch, caplog):
    may_write = threading.Event()
    monkeypatch.setattr(Files, "write", lambda *_: may_write.wait(60))
    options = {"num_pages": 256, "cache_dir": str(tmp_path), "cache_flush_timeout_s": 0.0}
    with open_llm(tiny.folder, **options) as llm:
        llm.generate([prompt(tokens(100))], greedy(), use_tqdm=False)
    may_write.set()
    assert [line for line in caplog.messages if "raise cache_flush_timeout_s" in line]


class SlowCopy:
    """A copy to host memory that is over once somebody waits for it."""

    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over

    def synchronize(self):
        self.is_over = True

    def seconds(self):
        return None


def test_host_memory_outlasts_the_copies_into_it(tiny):
    """Without a directory nothing is written at the end, and yet copies that run end first."""
    copies = []

    def begin(stores):
        copies.append(SlowCopy())
        return copies[-1]

    llm = open_llm(tiny.folder, num_pages=16, num_slots=8, cache_host_gib=0.05)
    engine = llm.llm_engine
    tiering_of(engine).transfers.copies.store = begin
    engine.add(Prompt(token_ids=tokens(300)), greedy())
    while not copies:
        engine.step()
    assert not copies[0].is_over
    engine.close()
    assert all(copy.is_over for copy in copies)
