"""Many threads use one `LLM`, and some give up or fail: answers are those of each request alone,
and nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from milepost.errors import InvalidRequestError
from tests.engines import WIDE_STATES, greedy, num_held, prompt, sampled, save_tiny, tokens
from tests.invariants import check

NUM_THREADS = 32
NUM_PROMPTS = 8
NIGHTLY_S = 120.0


class PlannedError(Exception):
    """Raised by a caller in the midst of its answer."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_next", torch.float64, **WIDE_STATES)


def prompts() -> list[list[int]]:
    """Some begin alike."""
    return [tokens(70, seed % 3) + tokens(30 + seed, 10 + seed) for seed in range(NUM_PROMPTS)]


def caller(llm, asked, expected, rng, done: Counter) -> Callable[[], None]:
    """Returns a function that does one of the things that callers do."""

    def ask(params, is_right):
        chosen = rng.choices(range(NUM_PROMPTS), k=rng.randint(1, 3))
        outputs = llm.generate([prompt(asked[i]) for i in chosen], params, use_tqdm=False)
        for index, output in zip(chosen, outputs, strict=True):
            assert is_right(index, output.outputs)

    def generate():
        ask(greedy(), lambda index, answers: answers[0].token_ids == expected[index])

    def generate_several():
        ask(sampled(6, n=3), lambda _, answers: [len(a.token_ids) for a in answers] == [6] * 3)

    def stream():
        index = rng.randrange(NUM_PROMPTS)
        *_, last = llm.stream(prompt(asked[index]), greedy())
        assert last.outputs[0].token_ids == expected[index]

    def give_up():
        index = rng.randrange(NUM_PROMPTS)
        outputs = llm.stream(prompt(asked[index]), greedy())
        for output in islice(outputs, rng.randint(1, 5)):
            tokens_so_far = output.outputs[0].token_ids
            assert tokens_so_far == expected[index][: len(tokens_so_far)]
        outputs.close()

    def fail():
        def break_off():
            for _ in llm.stream(prompt(asked[0]), greedy()):
                raise PlannedError

        with pytest.raises(PlannedError):
            break_off()

    def ask_for_nonsense():
        with pytest.raises(InvalidRequestError):
            llm.generate([prompt(asked[0]), prompt([-1])], greedy(), use_tqdm=False)

    def look():
        llm.get_metrics()
        llm.reset_prefix_cache()

    def act():
        action = rng.choice((generate, generate_several, stream, give_up, fail, look))
        for one in (action, ask_for_nonsense):
            one()
            done[one.__name__] += 1

    return act


def run(tiny, is_over: Callable[[int], bool]) -> Counter:
    """Has all threads act until it is over for them."""
    asked = prompts()
    tiny.learn(asked, [greedy()] * len(asked))
    expected = [tiny.expected(ids, greedy()) for ids in asked]
    before = set(threading.enumerate())  # other tests' may end meanwhile
    done: Counter = Counter()
    with tiny.open(max_num_seqs=8, async_scheduling=True, max_model_len=512) as llm:

        def work(number: int) -> None:
            act = caller(llm, asked, expected, random.Random(number), done)
            num_rounds = 0
            while not is_over(num_rounds):
                act()
                num_rounds += 1

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(work, range(NUM_THREADS)))
        assert not llm.llm_engine.has_work
        assert len(llm.llm_engine._completions) == 0
        assert num_held(llm) == (0, 0)
        check(llm.llm_engine.scheduler.cache)
        (output,) = llm.generate(prompt(asked[0]), greedy(), use_tqdm=False)
        assert output.outputs[0].token_ids == expected[0]
    assert set(threading.enumerate()) <= before
    return done


def test_many_threads_with_aborts_and_exceptions_leave_nothing(tiny):
    done = run(tiny, lambda num_rounds: num_rounds == 2)
    assert sum(done.values()) == NUM_THREADS * 2 * 2
    assert len(done) == 7


@pytest.mark.nightly
def test_the_same_for_two_minutes(tiny):
    end_s = time.monotonic() + NIGHTLY_S
    assert len(run(tiny, lambda _: time.monotonic() > end_s)) == 7
