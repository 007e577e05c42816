"""What a verb does is bounded, however much is cached and however long a prompt is: counted, not
timed."""

from __future__ import annotations

import sys

import pytest

from milepost.cache import Cache, Kind
from milepost.cache.eviction.hold_back import LOOKS_A_CHANGE, MAX_LOOKS
from milepost.cache.memory import UnifiedPool

PAGE_SIZE = 16


def run(cache, tokens, kind=Kind.ANSWER_END):
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain))
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    cache.release(allocation, kind)


def num_events(call):
    """Function calls and lines of Python that a call takes."""
    num = 0

    def count(frame, event, argument):
        nonlocal num
        num += 1
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(None)
    return num


def waiting_events(num_pages, num_states):
    """Of a request that waits: a match, a refresh, and an admission that finds no room, where a
    prompt of `num_pages` is cached, and `num_states` others.
    """
    cache = Cache(num_pages=num_pages + num_states + 8, num_slots=num_states + 8, page_size=16)
    for seed in range(num_states):
        run(cache, [seed] * PAGE_SIZE, kind=Kind.ANSWER_END)
    tokens = [7] * (num_pages * PAGE_SIZE)
    run(cache, tokens)
    chain = cache.chain([*tokens, *range(16 * (num_states + 16))])
    reservation = cache.expect(chain, num_ahead=3)
    cache.match(chain)
    events = []
    for _ in range(3):
        cache.reclaimer.version += 1  # something else has changed

        def ask():
            match = cache.match(chain)
            cache.refresh(reservation, match)
            assert cache.admit(chain, match) is None

        events.append(num_events(ask))
    return max(events)


@pytest.mark.parametrize("num_states", [10, 400])
def test_a_request_that_waits_costs_next_to_nothing(num_states):
    short, long = waiting_events(32, num_states), waiting_events(4096, num_states)
    assert long < short + 200, "the logarithm of its pages"
    assert long < 2000


def test_a_prompt_that_was_evicted_costs_the_logarithm_of_its_pages():
    def events(num_pages):
        cache = Cache(num_pages=num_pages, num_slots=4, page_size=PAGE_SIZE)
        tokens = [7] * (num_pages * PAGE_SIZE)
        run(cache, tokens)
        cache.reclaimer.evict_everything()
        chain = cache.chain(tokens)
        assert cache.match(chain).num_seen == num_pages
        cache.reclaimer.version += 1
        return num_events(lambda: cache.match(chain))

    assert events(2048) < events(32) + 60


def asked_of(num_states, num_changes, num_rounds, monkeypatch):
    """The checkpoints that are asked whether they are likely to return, round by round: each is a
    few admissions that find no room, `num_changes` of the cache after the last.
    """
    cache = Cache(num_pages=num_states, num_slots=num_states + 8, page_size=PAGE_SIZE)
    for seed in range(num_states):
        run(cache, [seed] * PAGE_SIZE)
    asked = []
    monkeypatch.setattr(
        type(cache.score), "is_expected", lambda _, checkpoint, __: not asked[-1].append(checkpoint)
    )
    chain = cache.chain([5000] * (num_states - 1) * PAGE_SIZE)
    for _ in range(num_rounds):
        asked.append([])
        for _ in range(3):
            cache.displaced(cache.match(chain))
        cache.reclaimer.version += num_changes
    return asked


def test_a_step_asks_few_of_many_states_whether_they_are_likely_to_return(monkeypatch):
    """However much has changed; and in the end has asked all of them."""
    asked = asked_of(2500, 1000, 6, monkeypatch)
    assert max(map(len, asked)) <= MAX_LOOKS
    assert len(set().union(*asked)) == 2500


def test_a_change_makes_a_step_ask_few_states_more(monkeypatch):
    _, *asked = asked_of(500, 1, 9, monkeypatch)
    assert all(0 < len(each) <= LOOKS_A_CHANGE for each in asked)


def test_where_much_has_changed_all_states_are_asked_anew(monkeypatch):
    """What was likely many changes ago lets in requests that take what others want at once."""
    asked = asked_of(500, 20, 3, monkeypatch)
    assert all(len(set(each)) == 500 for each in asked)


def test_many_who_wait_for_one_state_cost_no_more_than_a_few():
    def events(num_waiting):
        cache = Cache(num_pages=64, num_slots=8, page_size=PAGE_SIZE)
        run(cache, [1] * 64)
        chain = cache.chain([*[1] * 64, 0])
        reservations = [cache.expect(chain, num_ahead) for num_ahead in range(num_waiting)]
        cache.reclaimer.settle()

        def come_and_go():
            cache.forget(reservations[0])
            cache.expect(chain, 0)
            cache.reclaimer.settle()

        return num_events(come_and_go)

    assert events(3000) < events(3) + 100


def test_a_state_inside_one_of_many_pages_is_pinned_alone():
    """Others that end inside the same page are not looked at when somebody goes on from there."""

    def events(num_tails):
        cache = Cache(num_pages=num_tails + 40, num_slots=num_tails + 8, page_size=PAGE_SIZE)
        for seed in range(num_tails):
            run(cache, [*[1] * 16, seed + 2, 3])
        chain = cache.chain([*[1] * 16, 2, 3, *[4] * 30])
        match = cache.match(chain)
        assert match.state_length == 18

        def admit():
            cache.release(cache.admit(chain, match))
            cache.reclaimer.settle()

        return num_events(admit)

    assert events(1000) < events(10) + 200


def test_units_are_not_searched_again_before_one_can_have_become_idle():
    """In each of them a request holds a page; whoever waits for a slot asks in every step."""
    num_units = 1000
    unified = UnifiedPool(num_units, 4)
    pages = unified.pages.allocate(4 * num_units)
    unified.pages.keep(pages)
    unified.pages.unpin([page for page in pages if page % 4])
    first, again = (num_events(lambda: unified.has_room(0, 1)) for _ in range(2))
    assert first > num_units > 50 > again
    assert not unified.has_room(0, 1)
    unified.pages.unpin([page for page in pages if page // 4 == 700 and not page % 4])
    assert unified.has_room(0, 1)
    assert not unified.has_room(0, 2)
    assert unified.has_room(0, 1), "that two are missing says nothing of one"
