"""What goes down, what comes up, and that it is what it was."""

from __future__ import annotations

import random

import pytest

from milepost.cache import Cache
from milepost.cache.events import Departure
from milepost.cache.memory import Split, UnifiedPool
from milepost.cache.tree import (
    FullAttention,
    Recurrent,
    ShortConvolution,
    SlidingWindow,
    num_window_pages,
)
from milepost.pictures import Picture
from milepost.scheduler.encoders import PLAIN_COST, TowerCost
from milepost.scheduler.request import FinishReason
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers import loads as loads_module
from milepost.tiers.holdings import MeasuredRates, TierLimits
from milepost.tiers.policy import Tiers
from milepost.tiers.stores import MIN_SCORE
from tests.fakes import FakeRunner, cold_answer, make_request
from tests.invariants import check
from tests.tiers.faking import FakeTransfers, Files

PAGE_SIZE = 16
FREE = MeasuredRates(tokens_per_s=1.0, host_bytes_per_s=1e12, disk_bytes_per_s=1e12, load_s=0.0)
"""Nothing is worth computing."""


class Engine:
    def __init__(self, *, num_pages=12, num_slots=3, pages_each=0, host=(40, 8), disk=(0, 0),
                 beside=False, window=0, files=None, rates=FREE, under_way=(64, 4),
                 cost=PLAIN_COST, transfers_of=FakeTransfers):  # fmt: skip
        kinds = (
            FullAttention(),
            ShortConvolution(grid=PAGE_SIZE) if beside else Recurrent(grid=64),
            *([SlidingWindow(window=window)] if window else []),
        )
        storage = Split(num_pages, 0 if beside else num_slots)
        if pages_each:
            storage = UnifiedPool(-(-num_pages // pages_each) + num_slots, pages_each)
        num_windows = num_window_pages(
            window, PAGE_SIZE, num_states=storage.slots.capacity,
            max_num_seqs=4, max_num_batched_tokens=128,
        )  # fmt: skip
        sizes = {"storage": storage, "num_windows": num_windows}
        self.cache = Cache(page_size=PAGE_SIZE, kinds=kinds, **sizes)
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=4, max_num_batched_tokens=128, encoder_cache_size=1000
        )
        self.runner = FakeRunner(
            self.scheduler, page_size=PAGE_SIZE, kinds=kinds, pages_each=pages_each
        )
        limits = TierLimits(
            page_bytes=1, state_bytes=1,
            num_host_pages=host[0], num_host_states=host[1],
            num_disk_pages=disk[0], num_disk_states=disk[1],
            max_pages_under_way=under_way[0], max_states_under_way=under_way[1],
        )  # fmt: skip
        self.tiers = Tiers(self.cache, limits, rates, cost)
        self.transfers = transfers_of(self.scheduler, self.runner, self.tiers, files)
        self.requests = []

    def add(self, prompt, max_tokens=4, **options):
        request = make_request(
            self.cache, f"r{len(self.requests)}", prompt, max_tokens=max_tokens, **options
        )
        self.scheduler.add(request)
        self.requests.append((request, list(prompt)))
        return request

    def step(self):
        plan = self.scheduler.schedule()
        check(self.cache)
        if plan.sequences:
            result = self.runner.run(plan)
            self.transfers.launch(plan)
            self.scheduler.update(plan, result)
        elif plan.only_copies:
            self.runner.copy(plan)
            self.transfers.launch(plan)
        check(self.cache)
        return plan

    def idle(self):
        """What is copied while nothing runs."""
        while self.scheduler.outside.has_stores:
            plan = self.scheduler.plan_copies()
            self.runner.copy(plan)
            self.transfers.settle()
        self.transfers.settle()

    def ask(self, prompt, max_tokens=4, **options):
        request = self.add(prompt, max_tokens, **options)
        while self.scheduler.has_work:
            self.step()
            self.transfers.settle()
        self.idle()
        assert request.output_token_ids == cold_answer(prompt, max_tokens, 4)
        return request

    def crowd_out(self):
        """Other conversations, as many as the device holds."""
        for first in range(6):
            self.ask([first, *[3] * 90])


def prompt_of(request):
    return request.chain.tokens.tolist()


@pytest.mark.parametrize("pages_each", [0, 3])
@pytest.mark.parametrize(("beside", "window"), [(False, 0), (True, 0), (False, 1), (False, 40)])
def test_what_left_the_device_comes_back_from_the_host(beside, window, pages_each):
    pages_each = 0 if beside else pages_each
    engine = Engine(beside=beside, window=window, pages_each=pages_each, host=(200, 20))
    first = engine.ask([1] * 100)
    engine.crowd_out()
    assert engine.cache.match(first.chain).state_length == 0
    again = engine.ask([*prompt_of(first), 2, 2])
    end = 96 if beside else 103
    assert (again.report.reused, again.report.loaded) == (end, {"host": end})


def test_a_restart_finds_what_was_written():
    files = Files({})
    first = Engine(disk=(200, 20), files=files).ask([1] * 100)
    engine = Engine(disk=(200, 20), files=files)
    again = engine.ask([*prompt_of(first), 2, 2])
    assert again.report.loaded == {"disk": 103}
    third = engine.ask([*prompt_of(first), 3, 2])
    assert third.report.reused == 103


@pytest.mark.parametrize(("times", "place"), [(0.0, 0), (1.0, 103)])
def test_what_a_picture_takes_to_encode_counts_as_computing(times, place):
    """A load takes as long as 130 tokens of text: more than what it saves of them, and less than
    with the work of a picture of 60 tokens."""
    rates = MeasuredRates(
        tokens_per_s=100.0, host_bytes_per_s=1e12, disk_bytes_per_s=1e12, load_s=1.3
    )
    engine = Engine(host=(200, 20), rates=rates, cost=TowerCost(linear=times))
    shown = Picture(
        identity=bytes(16), offset=20, num_tokens=60, grid=(1, 2, 120), num_positions=60
    )
    first = engine.ask([1] * 100, pictures=[shown])
    engine.crowd_out()
    again = engine.ask([*prompt_of(first), 2, 2], pictures=[shown])
    assert again.report.loaded == ({"host": place} if place else {})


def test_a_state_is_written_behind_its_pages():
    """An engine that ends in between, or another one that looks, finds no state without them."""
    engine = Engine(host=(200, 20), disk=(400, 40))
    written = []
    engine.transfers.write = lambda **_: None
    first = engine.ask([1] * 100)
    engine.ask([*prompt_of(first), *[2] * 60])
    while writes := engine.tiers.writes.take(8):
        for item, copy in writes:
            is_first = item.position <= PAGE_SIZE if item.what == "page" else not item.position
            assert is_first or ("page", item.parent) in written or item.position < PAGE_SIZE
            assert item.what != "state" or not item.tokens or ("tail", item.key) in written
            written.append((item.what, item.key))
            engine.tiers.writes.written(item, copy, is_there=True)
    assert {what for what, _ in written} == {"page", "tail", "state"}


def test_a_file_that_is_gone_is_a_miss():
    files = Files({})
    first = Engine(disk=(200, 20), files=files).ask([1] * 100)
    engine = Engine(disk=(200, 20), files=files)
    files.held.clear()
    again = engine.ask([*prompt_of(first), 2, 2])
    assert again.report.loaded == {}
    assert again.report.lost["late_copy"] == 103


def test_what_is_sooner_computed_is_not_loaded():
    slow = MeasuredRates(tokens_per_s=1e9, host_bytes_per_s=1.0, load_s=0.0)
    engine = Engine(host=(200, 20), rates=slow)
    first = engine.ask([1] * 100)
    engine.crowd_out()
    again = engine.ask([*prompt_of(first), 2, 2])
    assert again.report.loaded == {}
    assert again.report.lost["not_worth_loading"] == 103


def test_what_is_still_on_its_way_down_is_not_read():
    """Its place in host memory holds anything until the copy is there."""
    engine = Engine(host=(200, 20))
    settle, engine.transfers.settle = engine.transfers.settle, lambda: None
    first = engine.add([1] * 100)
    for _ in range(30):
        engine.step()
    for other in range(6):
        engine.add([other, *[3] * 90])
        for _ in range(20):
            engine.step()
    assert engine.transfers.storing
    again = engine.add([*prompt_of(first), 2, 2])
    for _ in range(20):
        engine.step()
    assert again.report.loaded == {}
    assert again.report.lost["late_copy"] > 0
    settle()


def test_a_page_on_its_way_down_is_not_offered_nor_what_lies_behind_it():
    """A load of it would fail: that is right, and a waste of time."""
    engine = Engine(host=(200, 20))
    first = engine.ask([1] * 100)
    engine.crowd_out()
    again = make_request(engine.cache, "w", [*prompt_of(first), 2])
    match, host = engine.cache.match(again.chain), engine.tiers.host
    item = host.get("page", again.chain.full_digests()[3])
    host.remove(item)
    host.add(item.what, item.key, item.parent, item.tokens, item.position)
    offer = engine.tiers.loads.offer(again, match)
    assert offer.position < 64
    assert max(end for reason, end in offer.lost if reason == "late_copy") == 103


def test_a_state_behind_other_tokens_in_the_same_page_is_not_offered():
    engine = Engine(host=(200, 20))
    first = engine.ask([1] * 100)
    engine.crowd_out()
    other = make_request(engine.cache, "w", [*prompt_of(first)[:98], *[2] * 9])
    offer = engine.tiers.loads.offer(other, engine.cache.match(other.chain))
    assert offer.position <= 98


def test_states_that_end_at_the_same_position_cost_one_look(monkeypatch):
    """First turns of chats that share a system prompt hang on one page, by the thousand."""
    engine = Engine(num_pages=40, num_slots=8, host=(200, 100))
    for first in range(60):
        engine.ask([first % 4, first // 4 % 4, first // 16, 3, 3, 3], 2)
    assert engine.cache.reset()
    asked = make_request(engine.cache, "w", [0, 0, 0, 3, 3, 3, *[2] * 6])
    keys, key_of = [], loads_module.checkpoint_key
    monkeypatch.setattr(
        loads_module, "checkpoint_key", lambda *of: (keys.append(of), key_of(*of))[1]
    )
    engine.tiers.loads.offer(asked, engine.cache.match(asked.chain))
    assert len(keys) < PAGE_SIZE


def test_an_offer_is_looked_for_again_only_when_something_has_changed():
    """Many wait and are looked at with each step: a walk over their pages each time is too much."""
    engine = Engine(host=(200, 20))
    first = engine.ask([1] * 100)
    engine.crowd_out()
    waiting = make_request(engine.cache, "w", [*prompt_of(first), 2])
    match, loads = engine.cache.match(waiting.chain), engine.tiers.loads
    walks, find = [], loads._find
    loads._find = lambda *asked: (walks.append(asked), find(*asked))[1]
    assert [loads.offer(waiting, match).position for _ in range(3)] == [103] * 3
    assert len(walks) == 1
    host = engine.tiers.host
    host.remove(next(item for item in host if item.position == 103))
    assert loads.offer(waiting, match).position < 103
    assert len(walks) == 2


def test_offers_of_requests_that_are_gone_are_not_kept_for_ever(monkeypatch):
    """Where no tier changes, as where the same few prompts come again and again."""
    monkeypatch.setattr(loads_module, "MAX_OFFERED", 8)
    engine = Engine(host=(200, 20))
    first = engine.ask([1] * 100)
    engine.crowd_out()
    loads = engine.tiers.loads
    for number in range(50):
        again = make_request(engine.cache, "w", [*prompt_of(first), 2])
        again.number = number
        assert loads.offer(again, engine.cache.match(again.chain)).position == 103
    assert len(loads._offered) <= 8


def test_a_prompt_that_is_asked_again_comes_back():
    """Its answer's end is behind all that can be gone on from."""
    engine = Engine(host=(200, 20))
    for max_tokens in (1, 4):
        prompt = [max_tokens] * 100
        engine.ask(prompt, max_tokens)
        assert engine.cache.reset()
        assert engine.ask(prompt, max_tokens).report.loaded == {"host": 64}


@pytest.mark.parametrize(("score", "is_kept"), [(MIN_SCORE - 1, False), (MIN_SCORE, True)])
def test_of_what_leaves_only_states_that_are_likely_to_save_much_are_kept(score, is_kept):
    engine = Engine(host=(200, 20))
    left = Departure(
        key=b"k" * 16, parent=b"r" * 16, tokens=b"1234", position=1, what="state", id=1,
        score=score, num_moves=0,
    )  # fmt: skip
    engine.tiers.note((left,))
    assert bool(engine.tiers.take_stores(0)) is is_kept


def test_an_answers_end_goes_before_its_prompts_end_that_still_waits():
    """One of them may be on its way at a time: the next turn asks for the deeper."""
    engine = Engine(num_pages=30, num_slots=12, host=(200, 20), under_way=(64, 1))
    stores, order = engine.tiers.stores, []
    stored = stores.stored

    def note(what, key):
        if what == "state":
            order.append(engine.tiers.host.get(what, key).position)
        stored(what, key)

    stores.stored = note
    settle, engine.transfers.settle = engine.transfers.settle, lambda: None
    for first in range(3):
        engine.add([first, *[3] * 90])
    while engine.scheduler.has_work:
        engine.step()
    engine.transfers.settle = settle
    engine.idle()
    assert order == [64, 94, 94, 94, 64, 64], "one was on its way already"


def test_nobody_reads_what_another_salt_has():
    engine = Engine(host=(200, 20))
    first = engine.ask([1] * 100, salt="a")
    engine.crowd_out()
    assert engine.ask([*prompt_of(first), 2], salt="b").report.loaded == {}
    assert engine.ask([*prompt_of(first), 2], salt="a").report.loaded == {"host": 103}


def random_run(seed, num_operations, window=0):
    """Tiny memories on all three levels, copies that end in any order or not at all, aborts,
    prompts that part and meet, restarts on the same files.
    """
    rng = random.Random(seed)
    files = Files({})

    def engine_of():
        return Engine(
            num_pages=rng.choice([12, 16, 24]), num_slots=rng.choice([3, 4]),
            pages_each=rng.choice([0, 3]), host=(rng.choice([12, 30, 60]), rng.choice([1, 3, 8])),
            disk=rng.choice([(0, 0), (30, 4), (200, 30)]), beside=False, window=window, files=files,
            under_way=rng.choice([(64, 4), (3, 1)]),
        )  # fmt: skip

    engine = engine_of()
    known, loaded = [[]], 0
    for _ in range(num_operations):
        verb = rng.random()
        if verb < 0.12:
            base = rng.choice(known)
            cut = rng.choice([len(base), rng.randint(0, len(base))])
            prompt = [*base[: min(cut, 110)], *rng.choices(range(4), k=rng.randint(1, 60))]
            engine.add(prompt, rng.choice([1, 3, 20]), salt=rng.choice(["", "", "x"]))
        elif verb < 0.13 and engine.requests:
            engine.scheduler.finish(rng.choice(engine.requests[-4:])[0], FinishReason.ABORT)
        elif verb < 0.135:
            while engine.scheduler.has_work:
                engine.step()
                engine.transfers.settle(rng, 0.6)
            loaded += sum(engine.cache.stats.loaded.values())
            engine = engine_of()
        else:
            engine.step()
            engine.transfers.settle(rng, rng.choice([0.0, 0.2, 1.0]))
        for request, prompt in engine.requests[:]:
            if request.finish_reason is not None:
                answer = request.output_token_ids
                whole = cold_answer(prompt, request.max_tokens, 4)
                assert answer == whole[: len(answer)]
                if request.finish_reason is not FinishReason.ABORT:
                    assert len(answer) == request.max_tokens
                    known.append(request.chain.tokens.tolist()[:150])
                    del known[:-12]
                engine.requests.remove((request, prompt))
    while engine.scheduler.has_work:
        engine.step()
        engine.transfers.settle(rng, 0.6)
    while engine.transfers.storing or engine.transfers.loading:
        engine.transfers.settle()
    engine.transfers.write()
    if engine.tiers.holdings.limits.num_disk_pages:
        known = {(item.what, item.key) for item in engine.tiers.disk}
        assert files.held.keys() <= known, "a file that nobody knows takes room for ever"
    assert not any(item.pins for tier in (engine.tiers.host, engine.tiers.disk) for item in tier)
    assert engine.cache.pages.num_used == engine.cache.slots.num_used == 0
    return loaded + sum(engine.cache.stats.loaded.values())


@pytest.mark.parametrize(("seed", "window"), [*((seed, 0) for seed in range(5)), (5, 20), (6, 50)])
def test_random_operations(seed, window):
    assert random_run(seed, 2000, window) > 500
