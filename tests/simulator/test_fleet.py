"""Many engines in virtual time."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from milepost.cache import Cache
from milepost.simulator.cost import read_cost
from milepost.simulator.fleet import ROUTINGS, Fleet, Shape
from milepost.simulator.fleet.engine import FleetEngine
from milepost.simulator.fleet.routing import ByPrefix, Pages, Traffic
from milepost.simulator.tiers import TierSizes
from milepost.simulator.trace import TraceRequest
from tests.simulator.traces import Maker, one_engine

COST = read_cost("hybrid-35b-a3b-h200")
PAGE_BYTES = 64 * COST.page_token_bytes


def conversations(num: int, num_turns: int, *, gap_s: float = 3.0, **options):
    """Sessions of 20 pages and 3 more each turn, that take turns."""
    maker = Maker()
    prompts = [maker.pages(20) for _ in range(num)]
    for turn in range(num_turns):
        for number, prompt in enumerate(prompts):
            arrival_s = gap_s * (turn * num + number)
            maker.ask(prompt, arrival_s=arrival_s, session=str(number), **options)
            prompt += maker.pages(3)
    trace = maker.trace()
    trace.link_answers()
    return trace


def cache():
    return Cache(num_pages=400, num_slots=40, page_size=64)


def fleet_of(trace, routing, num_engines, make_cache=cache, **options):
    shape = {name: options.pop(name) for name in ("num_prefill", "bytes_per_s") if name in options}
    return Fleet(
        trace,
        make_cache,
        COST,
        Shape(num_engines=num_engines, **shape),
        routing=routing,
        closed=False,
        **options,
    )


def run(trace, routing, num_engines, **options):
    return fleet_of(trace, routing, num_engines, **options).run()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_engine_is_the_same_for_any_routing(routing):
    trace = conversations(6, 4, gap_s=0.05)
    alone = one_engine(trace, cache(), COST, closed=False).run()
    fleet = run(trace, routing, 1)
    stats = alone.only.cache.stats
    assert (fleet.hits, fleet.queries) == (stats.hits, stats.queries)
    assert fleet.ttft_s == alone.ttft_s
    assert fleet.end_s == alone.end_s


@pytest.mark.parametrize("num_engines", [1, 3])
def test_requests_that_come_during_a_step_wake_an_engine_once_after_it(num_engines, monkeypatch):
    """However many have come: an engine that each of them woke again after every later step would
    take the square of their number."""
    trace, run_engine, begins = conversations(60, 4, gap_s=0.0), FleetEngine.run, []

    def counted(engine, now_s):
        busy_s = engine.busy_s
        progress = run_engine(engine, now_s)
        begins.append(engine.busy_s > busy_s)
        return progress

    monkeypatch.setattr(FleetEngine, "run", counted)
    run(trace, "round-robin", num_engines)
    assert sum(begins) > 40
    assert len(begins) <= sum(begins) + 2 * len(trace.requests)


def test_conversations_that_stay_hit_what_round_robin_loses():
    trace = conversations(5, 6)
    found = {routing: run(trace, routing, 3) for routing in ROUTINGS}
    lengths = [request.input_length for request in trace.requests]
    for routing in ("session", "events", "prefix"):
        assert found[routing].hits == sum(lengths[:-5]), "all but what each turn adds"
        assert found[routing].busiest < 2
    assert found["round-robin"].hits < 0.6 * found["session"].hits
    assert found["round-robin"].queries == found["session"].queries == sum(lengths)


def test_a_thousand_engines():
    trace = conversations(50, 2, gap_s=0.002)
    fleet = run(trace, "events", 1000)
    assert fleet.hits == 50 * (20 * 64 + 1)
    assert len(fleet.ttft_s) == 100


def test_what_is_lacking_moves_between_pools_and_nothing_else():
    trace = conversations(1, 2, gap_s=30.0, output_length=70)
    fleet = fleet_of(trace, "session", 2, num_prefill=1, bytes_per_s=1e9)
    front, back = fleet.engines
    found = fleet.run()
    first = 20 * PAGE_BYTES + COST.state_bytes
    # Who prefills the next turn reads the answer's end, who decodes it what is new then.
    readback, rest = front.transfers.num_bytes, back.transfers.num_bytes - first
    assert readback == PAGE_BYTES * 2 + COST.state_bytes
    assert rest == PAGE_BYTES * 2 + COST.state_bytes
    assert found.moved_bytes == first + readback + rest
    assert found.hits == 20 * 64 + 1 + 70 - 1, "the first prompt and its answer, but its last token"
    alone = run(conversations(1, 2, gap_s=30.0, output_length=70), "session", 1)
    assert found.ttft_s[0] - alone.ttft_s[0] == pytest.approx(first / 1e9, rel=0.3)
    for engine in fleet.engines:
        assert not engine.cache.loans
        assert not engine.cache.allocations


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_random_traffic_ends_and_gives_everything_back(num_prefill):
    random, maker = Random(3), Maker()
    bases = [maker.pages(30) for _ in range(4)]
    for number in range(80):
        prompt = random.choice(bases)[: random.randrange(31)] + maker.pages(random.randrange(9))
        session, length = str(random.randrange(9)), random.randrange(1, 90)
        maker.ask(prompt, arrival_s=0.02 * number, session=session, output_length=length)
    tiers = TierSizes(host_bytes=int(200 * PAGE_BYTES + 20 * COST.state_bytes))
    fleet = fleet_of(maker.trace(), "events", 4, num_prefill=num_prefill, tiers=tiers)
    found = fleet.run()
    assert len(found.ttft_s) == 80
    assert found.num_refused == 0
    assert bool(found.moved_bytes) == bool(num_prefill)
    for engine in fleet.engines:
        assert not engine.cache.loans
        assert not engine.cache.allocations
    pools = [pool for pool in (fleet._front, fleet._back) if pool is not None]
    for pool in pools:
        assert not any(pool.traffic.num_requests)
        assert not any(pool.traffic.num_prefilling)


def test_what_no_engine_can_hold_is_refused_and_counted():
    maker = Maker()
    maker.ask(maker.pages(900))
    maker.ask(maker.pages(3))
    found = run(maker.trace(), "round-robin", 2)
    assert (found.num_refused, len(found.ttft_s)) == (1, 1)
    assert found.queries == 903 * 64 + 2


def test_a_router_knows_who_has_how_much():
    """By events alone, against a simple count."""
    random, pages, caches = Random(1), Pages(3), [cache() for _ in range(3)]
    listeners = [pages.listener(number) for number in range(3)]
    for each in caches:
        each.listen()
    texts = [[random.randrange(9) for _ in range(640)] for _ in range(3)]
    for step in range(200):
        at = random.randrange(3)
        if random.random() < 0.02:
            caches[at].reset()
        else:
            _use(caches[at], random.choice(texts)[: random.randrange(64, 640)])
        listeners[at](caches[at].take_events())
        if step % 10:
            continue
        keys = caches[0].chain(random.choice(texts)).full_digests()
        expected = {}
        for number in range(3):
            own = pages._own[number]
            depth = next((d for d, key in enumerate(keys) if key not in own), len(keys))
            expected |= {number: depth} if depth else {}
        assert {at: depth for at, depth in pages.depths(keys).items() if depth} == expected


def _use(one, tokens):
    chain = one.chain(tokens)
    allocation = one.admit(chain, one.match(chain))
    exports = one.take_exports(allocation, len(tokens))
    written = {export.slot: export.position for export in exports}
    one.commit(allocation, len(tokens), {**written, allocation.slot_out: len(tokens)})
    one.release(allocation)


def test_the_least_busy_is_the_one_that_was_sent_least_among_equals():
    traffic = Traffic(3)
    traffic.num_requests, traffic.num_sent = [1, 0, 0], [1, 5, 2]
    assert traffic.least_busy() == 2


def test_replicas_are_weighed_by_the_tokens_that_wait_not_by_requests():
    """One long prompt is more to wait for than five short ones, whoever has more pages."""
    traffic, pages, one = Traffic(2), Pages(2), cache()
    one.listen()
    tokens = list(range(640))
    _use(one, tokens)
    pages.listener(0)(one.take_events())
    keys = one.chain(tokens).full_digests()
    asked = TraceRequest(arrival_s=0.0, input_length=640, output_length=1, page_ids=array("I"))
    choose = ByPrefix(traffic, pages).choose
    assert choose(asked, keys, 64) == 0
    traffic.num_requests, traffic.num_prefilling = [5, 0], [60, 0]
    assert choose(asked, keys, 64) == 0
    traffic.num_requests, traffic.num_prefilling = [1, 0], [9000, 0]
    assert choose(asked, keys, 64) == 1
    traffic.num_requests, traffic.num_prefilling = [1, 5], [9000, 60]
    assert choose(asked, keys, 64) == 1


def test_an_engine_that_has_lent_its_memory_waits_until_it_is_read():
    """It has room for one prompt and a part of another, and a slow link."""
    trace = conversations(3, 2, gap_s=0.08)

    def little():
        return Cache(num_pages=30, num_slots=3, page_size=64)

    fleet = fleet_of(trace, "session", 3, make_cache=little, num_prefill=1, bytes_per_s=1e8)
    assert len(fleet.run().ttft_s) == 6
    assert not any(engine.cache.loans or engine.scheduler.has_work for engine in fleet.engines)
