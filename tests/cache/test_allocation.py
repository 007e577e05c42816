"""An allocation's states, its three positions, and what comes and goes from outside."""

from __future__ import annotations

import pytest

from milepost.cache import Cache, Kind
from milepost.cache.allocation import State
from milepost.cache.allocation.states import NEXT_STATES
from milepost.cache.events import Cleared, Departure
from milepost.cache.memory import Split, UnifiedPool
from milepost.cache.tree import checkpoint_key
from tests.follower import Follower
from tests.invariants import check

PAGE_SIZE = 16


@pytest.fixture
def cache():
    return Cache(num_pages=20, num_slots=3, page_size=PAGE_SIZE, grid=PAGE_SIZE)


def admit(cache, tokens, load_to=None):
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain), load_to=load_to)
    check(cache)
    return allocation


def run(cache, allocation, end):
    exports = cache.take_exports(allocation, end)
    check(cache)
    written = {allocation.slot_out: end} | {export.slot: export.position for export in exports}
    cache.commit(allocation, end, written)
    check(cache)


def serve(cache, tokens, kind=Kind.ANSWER_END):
    allocation = admit(cache, tokens)
    run(cache, allocation, len(allocation.chain))
    cache.release(allocation, kind)
    check(cache)


@pytest.mark.parametrize(("state", "following"), [(s, f) for s in State for f in State])
def test_nothing_happens_but_what_the_table_says(cache, state, following):
    allocation = admit(cache, range(20))
    allocation.state = state
    if following in NEXT_STATES[state]:
        allocation.become(following)
        assert allocation.state is following
    else:
        with pytest.raises(AssertionError, match="A5"):
            allocation.become(following)
        assert allocation.state is state


def test_no_step_ends_that_was_not_planned(cache):
    allocation = admit(cache, range(20))
    with pytest.raises(AssertionError, match="A5"):
        cache.commit(allocation, 20, {allocation.slot_out: 20})


def verify(cache, allocation, drafts, num_accepted):
    """A step that computes the last token and drafts, of which some are the answer's."""
    start, fold = allocation.committed, allocation.num_unfolded
    assert cache.extend(allocation, start + 1 + len(drafts))
    cache.take_exports(allocation, start + 1, num_drafts=len(drafts))
    assert allocation.is_verifying
    check(cache)
    for token in drafts[:num_accepted]:
        allocation.chain.extend((token,))
    allocation.chain.extend((999,))
    cache.commit(allocation, start + 1 + num_accepted, {allocation.slot_out: start} if fold else {})
    check(cache)


def test_a_state_stays_before_drafts_and_pages_are_published_as_far_as_they_are_right(cache):
    allocation = admit(cache, range(30))
    run(cache, allocation, 30)
    allocation.chain.extend((30,))
    verify(cache, allocation, [31, 32, 33, 34], 2)
    assert (allocation.state_length, allocation.committed, allocation.kv_length) == (30, 33, 33)
    assert (len(allocation.path), allocation.num_unfolded) == (2, 3)
    verify(cache, allocation, [1, 2], 0)
    assert (allocation.state_length, allocation.committed) == (33, 34)
    run(cache, allocation, 35)
    assert (allocation.state_length, allocation.committed, allocation.num_unfolded) == (35, 35, 0)
    cache.release(allocation, Kind.ANSWER_END)
    assert cache.match(cache.chain([*range(33), 999, 999, 7])).state_length == 35


def test_who_wants_the_state_at_its_end_has_the_tokens_folded_in_first(cache):
    for folds, kept in ((False, 30), (True, 33)):
        allocation = admit(cache, [folds, *range(1, 30)])
        run(cache, allocation, 30)
        allocation.chain.extend((30,))
        verify(cache, allocation, [31, 32], 2)
        if folds:
            cache.take_exports(allocation, allocation.committed)
            cache.commit(allocation, allocation.committed, {allocation.slot_out: 33})
        cache.release(allocation, Kind.ANSWER_END)
        check(cache)
        asked = cache.chain([folds, *range(1, 33), 999, 0])
        assert cache.match(asked).state_length == kept


def test_drafts_stand_behind_a_state_of_its_own_and_nothing_behind_them(cache):
    allocation = admit(cache, range(30))
    with pytest.raises(AssertionError, match="A6"):
        cache.take_exports(allocation, 30, num_drafts=1)
    run(cache, allocation, 30)
    allocation.chain.extend((30,))
    cache.take_exports(allocation, 31, num_drafts=1)
    with pytest.raises(AssertionError, match="A6"):
        cache.take_exports(allocation, 32)


def test_what_comes_from_outside_is_computed_no_more(cache):
    serve(cache, range(20))
    allocation = admit(cache, [*range(16), *range(100, 150)], load_to=50)
    chain, table = allocation.chain, allocation.page_table
    digests = chain.full_digests()
    assert [(a.what, a.id, a.key) for a in allocation.arrivals] == [
        ("page", table[1], digests[1]),
        ("page", table[2], digests[2]),
        ("tail", table[3], checkpoint_key(digests[2], chain.token_bytes(48, 50))),
        ("state", allocation.slot_out, checkpoint_key(digests[2], chain.token_bytes(48, 50))),
    ]
    with pytest.raises(AssertionError, match="A5"):
        cache.take_exports(allocation, 66)
    with pytest.raises(AssertionError, match="A5"):
        cache.release(allocation)
    cache.loaded(allocation)
    check(cache)
    assert (allocation.committed, allocation.write_from, len(allocation.path)) == (50, 50, 3)
    run(cache, allocation, 66)
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)
    assert cache.match(cache.chain([*chain.tokens, 0])).state_length == 66


def test_what_does_not_come_is_computed_from_what_was_cached(cache):
    serve(cache, range(20))
    allocation = admit(cache, [*range(20), *range(100, 150)], load_to=50)
    source, page_copy = allocation.source, allocation.page_copy
    cache.load_failed(allocation)
    check(cache)
    assert (allocation.committed, allocation.slot_in) == (20, source.slot)
    assert (allocation.source, allocation.page_copy) == (source, page_copy)
    assert page_copy is not None
    run(cache, allocation, 70)
    cache.release(allocation)
    check(cache)


def test_all_that_leaves_is_told_once_with_its_key(cache):
    told = []
    cache.listen()
    held = {}

    def note():
        for checkpoint in cache.tree.at_slot.values():
            held["state", checkpoint.key] = checkpoint.slot
            if checkpoint.tail_page is not None:
                held["tail", checkpoint.key] = checkpoint.tail_page
        for node in cache.tree.nodes.values():
            held["page", node.digest] = node.page

    for seed in range(12):
        serve(cache, range(100 * seed, 100 * seed + 60 + seed))
        note()
        told += [event for event in cache.take_events() if isinstance(event, Departure)]
    here = {("state", c.key) for c in cache.tree.at_slot.values()}
    here |= {("tail", c.key) for c in cache.tree.at_slot.values() if c.tail}
    here |= {("page", node.digest) for node in cache.tree.nodes.values()}
    assert {(d.what, d.key): d.id for d in told} == {
        thing: id_ for thing, id_ in held.items() if thing not in here
    }
    assert len(told) == len(held) - len(here), "each leaves once"
    assert {d.what for d in told} == {"state", "tail", "page"}
    assert any(d.score > 0 for d in told if d.what == "state")
    assert cache.reset()
    assert cache.take_events() == (Cleared(),)


def test_nobody_who_listens_costs_nothing(cache):
    for seed in range(12):
        serve(cache, range(100 * seed, 100 * seed + 60 + seed))
    assert cache.stats.checkpoints_evicted
    assert cache.reset()
    assert cache.take_events() == ()


def test_who_listens_late_is_told_what_is_there(cache):
    serve(cache, range(40))
    serve(cache, [*range(20), *range(100, 130)])
    follower = Follower(PAGE_SIZE)
    cache.listen()
    cache.listen()
    follower.follow(cache.take_events())
    follower.check(cache)
    chain = cache.chain([*range(40), 1])
    assert follower.hit(chain) == cache.match(chain).state_length > 0


def test_a_page_is_reachable_while_a_state_at_or_behind_its_end_is_there(cache):
    cache.listen()
    serve(cache, range(40))
    follower = Follower(PAGE_SIZE)
    follower.follow(cache.take_events())
    assert len(follower.pages) == len(follower.reachable) == 2
    (end,) = (c for c in cache.tree.at_slot.values() if c.position == 40)
    cache.reclaimer.evict_checkpoint(end, "pages")
    for checkpoint in list(cache.tree.at_slot.values()):
        if checkpoint.position == 32:
            cache.reclaimer.evict_checkpoint(checkpoint, "pages")
    follower.follow(cache.take_events())
    follower.check(cache)
    assert (len(follower.pages), len(follower.reachable)) == (2, 0)


def test_a_tail_that_is_lent_is_no_room(cache):
    """Not even where a full page has the same KV: it stays in the cache with its state."""
    serve(cache, range(40))
    serve(cache, range(60))
    chain = cache.chain(range(48))
    loan = cache.lend(chain)
    check(cache)
    assert (loan.position, cache.match(chain).kv_length) == (40, 48)
    num_pages, num_slots = cache.room
    assert num_slots == 2
    assert admit(cache, range(1000, 1000 + PAGE_SIZE * (num_pages + 1))) is None
    allocation = admit(cache, range(1000, 1000 + PAGE_SIZE * num_pages))
    assert cache.room[0] == 0
    cache.release(allocation)
    cache.take_back(loan)
    check(cache)


@pytest.mark.parametrize(("storage", "each"), [(Split(20, 10), 0.1), (UnifiedPool(20, 4), 0.075)])
def test_no_more_than_a_share_is_lent(storage, each):
    """Each loan is of two pages and a slot; what two loans have in common is lent once."""
    cache = Cache(storage=storage, page_size=PAGE_SIZE, grid=PAGE_SIZE)
    prompts = [[first, *range(100, 147)] for first in range(4)]
    for prompt in prompts:
        serve(cache, prompt)
    shares, loans = [], []
    for prompt in [prompts[0], *prompts]:
        loans.append(cache.lend(cache.chain(prompt), most=0.2))
        check(cache)
        shares.append(cache.loans.share)
    assert shares == pytest.approx([each, each, 2 * each, 2 * each, 2 * each])
    assert [loan is not None for loan in loans] == [True, True, True, False, False]
    assert cache.loans.num_refused == 2
    for loan in loans[:3]:
        cache.take_back(loan)
        check(cache)
    assert cache.loans.share == 0
    assert cache.lend(cache.chain(prompts[3]), most=0.2)
