"""The bitwise mode, on a runner that tells a prompt's tokens from an answer's."""

from __future__ import annotations

import pytest

from milepost.cache import Cache, Kind, Lost
from milepost.cache.tree import Chain
from milepost.scheduler.canonical import Canonical
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, Loop, cold_answer, make_request, run_all, step
from tests.scheduler import fuzz

GRID = 64


class Engine:
    """A bitwise scheduler over a fake runner."""

    def __init__(self, num_pages=64, num_slots=16, *, max_num_seqs=4, budget=512, page_size=16):
        self.cache = Cache(
            num_pages=num_pages, num_slots=num_slots, page_size=page_size, bitwise=True
        )
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.canonical = Canonical(self.scheduler)
        self.runner = FakeRunner(self.scheduler, page_size=page_size, bitwise=GRID)

    def add(self, prompt, max_tokens=4):
        request = make_request(self.cache, "r", prompt, max_tokens=max_tokens)
        self.scheduler.add(request)
        return request

    def rest(self):
        """Returns how many answers were canonicalized."""
        num = 0
        while self.canonical.begin():
            run_all(self.scheduler, self.runner)
            num += 1
        return num

    def answer(self, prompt, max_tokens=4):
        request = self.add(prompt, max_tokens)
        run_all(self.scheduler, self.runner)
        assert request.output_token_ids == cold_answer(prompt, max_tokens, 4, GRID)
        return request


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 200, 256])
def test_a_repeated_prompt_loses_less_than_a_grid_step(length):
    engine, prompt = Engine(), [1, 2, 3] * length
    prompt = prompt[:length]
    engine.answer(prompt)
    report = engine.answer(prompt).report
    assert report.computed == (length - 1) % GRID + 1


def test_a_preempted_request_keeps_no_state_in_its_answer():
    """A step that exports a state runs in the kernels of prefills, which round in another way than
    those of the answer's other tokens."""
    cache = Cache(
        num_pages=4, num_slots=4, page_size=64, mode="all", block_size=64, grid=1, bitwise=True
    )
    chain = cache.chain(range(63))
    chain.extend(range(30))
    allocation = cache.admit(chain, cache.match(chain))
    assert cache.take_exports(allocation, 63) == []
    cache.commit(allocation, 63, {allocation.slot_out: 63})
    assert cache.take_exports(allocation, 64) == []


def test_a_slot_for_a_branch_point_is_free_once_a_load_has_passed_it():
    cache = Cache(num_pages=20, num_slots=6, page_size=16, grid=16, bitwise=True)
    first = cache.chain(range(64))
    allocation = cache.admit(first, cache.match(first))
    cache.take_exports(allocation, 64, most=0)
    cache.commit(allocation, 64, {allocation.slot_out: 64})
    cache.release(allocation, Kind.ANSWER_END)
    second = cache.chain([*range(32), *range(100, 150)])
    allocation = cache.admit(second, cache.match(second), load_to=80)
    assert len(allocation.slots_kept) == 1
    cache.loaded(allocation)
    assert cache.take_exports(allocation, 82) == []
    assert allocation.slots_kept == []


def test_an_answer_is_reused_once_a_prompt_has_held_it():
    engine, prompt = Engine(), [1] * 100
    first = engine.answer(prompt, max_tokens=100)
    chat = [*prompt, *first.output_token_ids, *[2] * 20]
    second = engine.answer(chat)
    assert second.report.reused == 64
    assert second.report.lost[Lost.NOT_CANONICAL] >= 100
    assert engine.answer(chat).report.reused == 192


def test_an_idle_engine_canonicalizes_answers():
    engine, prompt = Engine(), [1] * 100
    first = engine.answer(prompt, max_tokens=100)
    assert engine.rest() == 1
    chat = [*prompt, *first.output_token_ids, *[2] * 20]
    report = engine.answer(chat).report
    assert report.reused == 192
    assert Lost.NOT_CANONICAL not in report.lost
    assert engine.cache.stats.queries == 100 + 220, "nobody asked for the other one"
    assert engine.rest() == 0, "its answer ends before the next grid position"


def test_canonicalizing_gives_way_and_goes_on_later():
    engine, prompt = Engine(num_pages=256, budget=64, max_num_seqs=1), [1] * 100
    first = engine.answer(prompt, max_tokens=300)
    assert engine.canonical.begin()
    for _ in range(3):
        step(engine.scheduler, engine.runner)
    engine.canonical.give_way()
    other = engine.answer([3] * 70)
    assert other.report.reused == 0
    before = engine.scheduler.stats.prefill_tokens
    assert engine.rest() == 1
    assert engine.scheduler.stats.prefill_tokens - before < 384 - 2 * 64
    report = engine.answer([*prompt, *first.output_token_ids]).report
    assert report.reused == 384


def test_an_answer_that_finds_no_room_is_computed_once():
    engine = Engine(num_slots=1)
    engine.answer([1] * 100, max_tokens=100)
    assert engine.rest() == 1


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_a_request_that_lost_its_place_computes_its_answer_by_decodes_again(num_drafts):
    """An engine that verifies drafts takes the tokens that it knows as such."""
    engine = Engine(num_pages=16)
    requests = [engine.add([number] * 70, max_tokens=90) for number in (1, 2)]
    for request in requests:
        request.most_replayed = num_drafts
    loop, num_steps, replayed = Loop(engine.scheduler, engine.runner), 0, []
    while engine.scheduler.has_work:
        plan = loop.step(is_ahead=num_steps % 3 > 0)
        num_steps += 1
        replayed += [s.num_drafts for s in plan.sequences if s.num_drafts]
    assert engine.scheduler.stats.num_preemptions
    for request, token in zip(requests, (1, 2), strict=True):
        assert request.output_token_ids == cold_answer([token] * 70, 90, 4, GRID)
    assert max(replayed, default=0) == num_drafts
    assert bool(num_drafts) == (sum(replayed) > 20)
    assert not engine.scheduler.stats.num_draft_tokens, "nobody drafted any"


@pytest.mark.parametrize("further", [16, 1000])
def test_sharing_more_of_a_chain_is_found_out(further, monkeypatch):
    """What a prompt's last chunk or an answer leaves is not what others may read."""

    def chain(cache, tokens, salt=""):
        found = Chain(tokens, cache.page_size, salt, cache.identity)
        if cache.config.bitwise:
            found.shared_end = len(found) - len(found) % GRID + further
        return found

    monkeypatch.setattr(Cache, "chain", chain)
    monkeypatch.setattr(fuzz, "BITWISE", 1.0)
    failures = [fuzz.attempt(seed, 100) for seed in range(20)]
    assert any(failures)
