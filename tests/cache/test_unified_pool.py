"""Pages and slots in one unified pool: ids, room, and a boundary that moves both ways."""

from __future__ import annotations

import random

import pytest

from milepost.cache import Cache, Kind
from milepost.cache.memory import UnifiedPool, fit
from tests.invariants import check

PAGE_SIZE = 64


def serve(cache, seed, num_pages, kind=Kind.ANSWER_END):
    """One request with a prompt of its own, all in one step."""
    chain = cache.chain([seed] * (num_pages * PAGE_SIZE))
    allocation = cache.admit(chain, cache.match(chain))
    assert allocation is not None
    exports = cache.take_exports(allocation, len(chain))
    written = {allocation.slot_out: len(chain)} | {e.slot: e.position for e in exports}
    cache.commit(allocation, len(chain), written)
    check(cache)
    cache.release(allocation, kind)
    check(cache)


def hit(cache, seed, num_pages):
    chain = cache.chain([seed] * (num_pages * PAGE_SIZE) + [seed + 1])
    return cache.match(chain).state_length


def test_pages_of_a_unit_are_numbered_by_it():
    unified = UnifiedPool(3, 4)
    assert sorted(unified.pages.allocate(12)) == list(range(4, 16))
    assert unified.slots.num_free == 0


def test_a_long_run_gets_whole_units_and_the_rest_stands_together():
    unified = UnifiedPool(4, 4)
    first = unified.pages.allocate(6)
    second = unified.pages.allocate(2)
    assert sorted({page // 4 for page in first}) == sorted({page // 4 for page in first + second})
    assert unified.slots.num_free == 2


def test_a_unit_whose_pages_are_free_is_free():
    unified = UnifiedPool(2, 4)
    pages = unified.pages.allocate(5)
    assert unified.slots.num_free == 0
    unified.pages.unpin(pages[4:])
    assert unified.slots.num_free == 1
    unified.pages.unpin(pages[:4])
    assert (unified.slots.num_free, unified.pages.num_free) == (2, 8)


@pytest.mark.parametrize("num_slots", range(5))
def test_room_is_what_can_be_had_together(num_slots):
    unified = UnifiedPool(4, 3)
    most = 3 * (4 - num_slots)
    assert unified.has_room(most, num_slots)
    assert not unified.has_room(most + 1, num_slots)
    held = unified.slots.allocate(num_slots)
    assert len(held) == num_slots
    assert len(unified.pages.allocate(most)) == most


def test_a_page_that_is_held_keeps_its_unit_from_slots():
    unified = UnifiedPool(2, 3)
    pages = unified.pages.allocate(4)
    unified.pages.keep(pages)
    unified.pages.unpin(pages[:3])
    assert unified.has_room(0, 1)
    assert not unified.has_room(0, 2)
    assert unified.has_room(2, 1)
    assert not unified.has_room(3, 1)


def test_long_prompts_take_the_place_of_states_and_short_ones_take_it_back():
    cache = Cache(storage=UnifiedPool(24, 8), page_size=PAGE_SIZE)
    for seed in range(40):
        serve(cache, 2 * seed, 2)
    many = cache.slots.num_cached
    for seed in range(100, 104):
        serve(cache, 2 * seed, 80)
    few = cache.slots.num_cached
    assert hit(cache, 206, 80) == 80 * PAGE_SIZE, "the last long prompt is there"
    for num_pages in (2, 3, 4):
        for seed in range(200, 230):
            serve(cache, 2 * seed, num_pages)
    again = cache.slots.num_cached
    assert few < many - 5
    assert again > few + 3, (many, few, again)


def test_a_state_whose_pages_a_request_holds_frees_its_slot_alone():
    """So it is worth more for its bytes than a fresher one that would free its pages too."""
    cache = Cache(storage=UnifiedPool(12, 4), page_size=PAGE_SIZE)
    chain = cache.chain([1] * (12 * PAGE_SIZE + 1))
    running = cache.admit(chain, cache.match(chain))
    exports = cache.take_exports(running, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(running, len(chain), {running.slot_out: len(chain)} | written)
    serve(cache, 3, 12)
    assert (hit(cache, 1, 12), hit(cache, 3, 12)) == (12 * PAGE_SIZE, 12 * PAGE_SIZE)
    while hit(cache, 3, 12) == 12 * PAGE_SIZE:
        serve(cache, 1000 + 2 * cache.score.clock, 2)
    assert hit(cache, 1, 12) == 12 * PAGE_SIZE
    cache.release(running, Kind.ANSWER_END)
    check(cache)


def test_a_request_that_is_alone_can_have_all_but_its_own_slot():
    cache = Cache(storage=UnifiedPool(6, 4), page_size=PAGE_SIZE)
    for seed in range(20):
        serve(cache, 2 * seed, 3)
    serve(cache, 1000, cache.storage.max_pages)
    chain = cache.chain([1] * ((cache.storage.max_pages + 1) * PAGE_SIZE))
    before = cache.reclaimer.version
    assert cache.admit(chain, cache.match(chain)) is None
    assert cache.reclaimer.version == before
    check(cache)


@pytest.mark.parametrize(
    ("page_bytes", "slot_bytes", "pages_each"),
    [(10, 491, 49), (10, 497, 50), (10, 10, 1), (10, 3, 1)],
)
def test_units_leave_little_unused(page_bytes, slot_bytes, pages_each):
    unified = fit(5000, page_bytes=page_bytes, slot_bytes=slot_bytes)
    assert unified.pages_a_slot == pages_each
    assert unified.num_units == 5000 // max(slot_bytes, pages_each * page_bytes)


def test_the_emptiest_unit_that_no_request_holds_is_cleared():
    unified = UnifiedPool(3, 4)
    pages = unified.pages.allocate(12)
    kept = {
        unit: [p for p in pages if p // 4 == unit][:num] for unit, num in ((1, 2), (2, 1), (3, 3))
    }
    for ids in kept.values():
        unified.pages.keep(ids)
    unified.pages.unpin([page for page in pages if page not in kept[2]])
    assert unified.slots.num_free == 0
    assert unified.unit_to_clear() == 1, "unit 2 holds fewer pages, but a request holds one"
    sources, targets = zip(*unified.make_way(1), strict=True)
    assert list(sources) == kept[1]
    assert {target // 4 for target in targets} <= {2, 3}
    assert all(unified.pages.cached_refs(target) == 1 for target in targets)
    assert unified.slots.num_free == 1


def test_what_moved_is_found_where_it_has_gone():
    """The plan's copies, in order, account for every page that stands elsewhere than before."""
    cache = Cache(storage=UnifiedPool(12, 5), page_size=PAGE_SIZE)
    rng, moved = random.Random(0), 0
    for seed in range(120):
        before = dict(cache.tree.at_page)
        chain = cache.chain([seed] * rng.randrange(20, 9 * PAGE_SIZE))
        allocation = cache.admit(chain, cache.match(chain))
        assert allocation is not None
        for move in cache.take_moves():
            before[move.target] = before.pop(move.source, None)
            moved += 1
        assert cache.take_moves() == ()
        at_page = cache.tree.at_page
        stay = {page for page, node in before.items() if node and at_page.get(page) is node}
        assert stay == at_page.keys(), "no page stands where no copy put it"
        assert cache.take_exports(allocation, len(chain), most=0) == []
        cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)})
        check(cache)
        cache.release(allocation, Kind.ANSWER_END)
        check(cache)
    assert moved > 10
