"""The hits that Milepost promises, at page size 64 in the default mode, at the level of plans."""

from __future__ import annotations

import random

import pytest

from milepost.cache import Cache
from milepost.cache.tree import upwards
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, make_request, run_all

VOCAB = 1000


def tokens(num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num)


class Bench:
    def __init__(self, **cache_options) -> None:
        options = {"num_pages": 2048, "num_slots": 64} | cache_options
        self.cache = Cache(**options)
        self.scheduler = Scheduler(self.cache, max_num_seqs=64, max_num_batched_tokens=8192)
        self.runner = FakeRunner(self.scheduler, page_size=self.cache.page_size, vocab_size=VOCAB)
        self._num = 0

    def ask(self, prompt: list[int], **options) -> Request:
        request = self.submit(prompt, **options)
        run_all(self.scheduler, self.runner, checked=False)
        return request

    def submit(self, prompt: list[int], **options) -> Request:
        self._num += 1
        request = make_request(self.cache, f"r{self._num}", prompt, **options)
        self.scheduler.add(request)
        return request


def shared_prompts(shared: int, own: int, num: int) -> list[list[int]]:
    return [tokens(shared, 0) + tokens(own, 1 + i) for i in range(num)]


@pytest.mark.parametrize(
    ("shared", "own", "num", "marks", "reused"),
    [
        (400, 100, 4, (), [0, 0, 384, 384]),
        (400, 100, 4, (400,), [0, 384, 384, 384]),
        (1500, 700, 3, (), [0, 0, 1472]),
        (1500, 700, 3, (1500,), [0, 1472, 1472]),
    ],
)
def test_shared_system_prompt(shared, own, num, marks, reused):
    bench = Bench()
    requests = [bench.ask(p, marks=marks) for p in shared_prompts(shared, own, num)]
    assert [r.report.reused for r in requests] == reused


def test_shared_system_prompt_all_at_once():
    bench = Bench()
    requests = [bench.submit(p) for p in shared_prompts(400, 100, 4)]
    run_all(bench.scheduler, bench.runner)
    assert [r.report.reused for r in requests] == [0, 384, 384, 384]


def test_the_same_prompt_twice():
    bench = Bench()
    prompt = tokens(2200, 0)
    bench.ask(prompt)
    report = bench.ask(prompt).report
    assert report.reused == 2176
    assert report.lost == {"grid": 23, "last_token": 1}


@pytest.mark.parametrize("shared", [1, 15, 16, 40, 63, 64, 65, 70, 72, 100, 130, 400, 700])
def test_no_checkpoint_means_that_the_next_prompt_hits(shared):
    """What `grid` and `under_page` name is computed again each time."""
    bench = Bench()
    _, second, third = (bench.ask(p).report for p in shared_prompts(shared, 30, 3))
    assert third.reused == second.reused + second.lost.get("no_checkpoint", 0)
    never = shared - third.reused
    assert third.lost == {
        **({"under_page" if shared < 64 else "grid": never} if never else {}),
        "unseen": 30,
    }


@pytest.mark.parametrize(
    ("length", "reason"), [(15, "under_page"), (40, "under_page"), (90, "grid")]
)
def test_a_mode_that_keeps_no_branch_point_says_so(length, reason):
    bench = Bench(mode="align")
    whole = tokens(300, 0)
    bench.ask(whole)
    kept = {"no_checkpoint": 64} if length > 64 else {}
    again = bench.ask(whole[:length]).report
    assert again.lost == {**kept, reason: length - 1 - sum(kept.values()), "last_token": 1}


def test_chat_second_turn_reuses_all_that_was_computed():
    bench = Bench()
    first = bench.ask(tokens(1000, 0), max_tokens=800)
    assert first.num_output_tokens == 800
    second = bench.ask([*first.chain.tokens, *tokens(50, 1)])
    assert second.report.reused == 1799


def test_cold_prompt_takes_one_prefill_pass():
    bench = Bench()
    bench.ask(tokens(1057, 0), max_tokens=1)
    assert bench.runner.num_steps == 1


def test_one_running_request_holds_one_slot():
    bench = Bench()
    bench.submit(tokens(2000, 0), max_tokens=8)
    plan = bench.scheduler.schedule()
    bench.scheduler.update(plan, bench.runner.run(plan))
    assert bench.cache.slots.num_used == 1


def test_own_checkpoints_give_way_under_pressure():
    bench = Bench(num_slots=2)
    requests = [bench.submit(tokens(300, i), max_tokens=8) for i in range(2)]
    run_all(bench.scheduler, bench.runner)
    assert [r.num_output_tokens for r in requests] == [8, 8]
    assert [r.num_preemptions for r in requests] == [0, 0]


def test_a_long_chat_that_loses_checkpoints_falls_back_to_the_next_one():
    bench = Bench()
    history = tokens(500, 0)
    for turn in range(20):
        history = [*bench.ask(history, max_tokens=50).chain.tokens, *tokens(950, 1 + turn)]
    assert len(history) > 20_000
    path = list(upwards(bench.cache.match(bench.cache.chain(history)).checkpoint))
    assert len(path) >= 2
    for checkpoint in path:
        match = bench.cache.match(bench.cache.chain(history))
        assert match.state_length == checkpoint.position
        bench.cache.reclaimer.evict_checkpoint(checkpoint, "slots")
    assert bench.cache.match(bench.cache.chain(history)).state_length == 0


def test_an_evicted_state_inside_a_page_is_named_for_its_own_continuation_alone():
    bench = Bench()
    first = bench.ask(tokens(1000, 0), max_tokens=30)
    history = list(first.chain.tokens)
    match = bench.cache.match(bench.cache.chain([*history, 1, 2]))
    assert match.state_length == 1029
    bench.cache.reclaimer.evict_checkpoint(match.checkpoint, "slots")
    lost = bench.cache.match(bench.cache.chain([*history[:1029], *tokens(70, 9)])).report.lost
    assert lost == {"checkpoint_evicted": 1029 - 960, "unseen": 70}
    other = [*history[:1024], *tokens(75, 8)]
    lost = bench.cache.match(bench.cache.chain(other)).report.lost
    assert "checkpoint_evicted" not in lost
