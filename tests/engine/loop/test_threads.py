"""What callers of one `LLM` on several threads do to each other: nothing."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from milepost import LLM
from tests.engines import (
    WIDE_STATES,
    greedy,
    num_held,
    prompt,
    sampled,
    save_tiny,
    tokens,
)
from tests.invariants import check

NUM_THREADS = 4


@pytest.fixture(autouse=True)
def interrupts_raise():
    """A shell's background job starts with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", torch.float64, **WIDE_STATES)


def generate(llm: LLM, *seeds: int):
    prompts = [prompt(tokens(60, seed)) for seed in seeds]
    return llm.generate(prompts, greedy(), use_tqdm=False)


def is_idle(llm: LLM) -> bool:
    check(llm.llm_engine.scheduler.cache)
    return not llm.llm_engine.has_work and num_held(llm) == (0, 0)


def test_threads_are_served_together(tiny):
    """Answers are what each thread alone would have got, and steps serve several threads."""
    llm = tiny.open(async_scheduling=True)
    engine, widths, added = llm.llm_engine, [], []
    schedule, queue, step = engine.scheduler.schedule, engine.queue, engine.step
    begin = threading.Barrier(NUM_THREADS)

    def work(number: int):
        begin.wait(30)
        if number % 2:
            return list(llm.stream(prompt(tokens(60, number)), greedy()))[-1:]
        outputs = generate(llm, number, number + 10)
        llm.get_metrics()
        llm.reset_prefix_cache()
        return outputs

    def counted():
        plan = schedule()
        widths.append(len({sequence.number for sequence in plan.sequences}))
        return plan

    def noted(*given):
        added.append(given)
        return queue(*given)

    def held():
        """Nothing begins until all have asked: two threads for two answers, two for one."""
        if len(added) == 6:
            step()

    engine.scheduler.schedule, engine.queue, engine.step = counted, noted, held
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for outputs in threads.map(work, range(NUM_THREADS)):
            tiny.check(outputs)
    assert max(widths) == 6, "a step serves all threads"
    assert is_idle(llm)


@pytest.mark.parametrize("where", ["schedule", "update", "prepare"])
def test_an_interrupt_ends_only_what_the_main_thread_asked_for(tiny, monkeypatch, where):
    """Wherever the engine is then: Ctrl-C reaches the main thread, which only waits."""
    llm = tiny.open()
    scheduler = llm.llm_engine.scheduler
    call, calls = getattr(scheduler, where), []

    def interrupting(*args):
        calls.append(args)
        if len(calls) == 3:
            _thread.interrupt_main()
        return call(*args)

    with ThreadPoolExecutor(1) as threads:
        other = llm.stream(prompt(tokens(60, 5)), greedy())
        next(other)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, where, interrupting)
            with pytest.raises(KeyboardInterrupt):
                generate(llm, 1, 2)
        tiny.check(threads.submit(lambda: list(other)[-1:]).result())
    assert is_idle(llm)
    tiny.check(generate(llm, 1, 2))


def test_an_interrupt_while_prompts_are_queued_leaves_none(tiny, monkeypatch):
    llm = tiny.open()
    queue, calls = llm.llm_engine.queue, []

    def interrupting(*args):
        calls.append(args)
        if len(calls) == 2:
            _thread.interrupt_main()
        return queue(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "queue", interrupting)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, 1, 2, 3)
    assert len(calls) == 3, "queueing goes on without its caller, who then gives all of it up"
    assert is_idle(llm)


def test_a_failing_caller_takes_nobody_along(tiny, monkeypatch):
    """Here its progress bar cannot be written."""
    llm = tiny.open()
    neighbour = llm.stream(prompt(tokens(60, 5)), greedy())
    next(neighbour)
    monkeypatch.setattr("milepost.engine.llm.tqdm.update", _fail)
    with pytest.raises(OSError, match="no room"):
        llm.generate([prompt(tokens(60, 1))], greedy())
    tiny.check(list(neighbour)[-1:])
    assert is_idle(llm)


def test_a_stream_may_be_collected_in_mid_step(tiny, monkeypatch):
    """Garbage is collected wherever memory is asked for: also by the engine's own thread."""
    llm = tiny.open()
    left = [llm.stream(prompt(tokens(60, 1)), greedy())]
    next(left[0])
    update = llm.llm_engine.scheduler.update

    def collecting(*args):
        left.clear()
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.scheduler, "update", collecting)
        tiny.check(generate(llm, 2))
    assert not left
    assert llm.get_metrics(), "whatever was queued before has been done"
    assert is_idle(llm)


def test_a_bias_that_its_caller_changes_is_what_it_was(tiny):
    llm = tiny.open()
    bias = {7: 100.0}
    params = greedy(6, logit_bias=bias)
    stream = llm.stream(prompt(tokens(60)), params)
    next(stream)
    bias[10**6] = 1.0
    last = list(stream)[-1]
    assert last.outputs[0].token_ids == [7] * 6


def test_an_engine_that_nobody_has_is_gone_with_its_thread(tiny):
    llm = tiny.open()
    next(islice(llm.stream(prompt(tokens(60)), sampled()), 1))
    thread, engine = llm._thread._thread, weakref.ref(llm.llm_engine)
    del llm
    gc.collect()
    thread.join(30)  # whoever drops the last reference, also this thread itself
    assert not thread.is_alive()
    assert engine() is None


def _fail(*_):
    raise OSError("no room")
