"""What waiting requests will resume from, and what is likely to be asked for, is kept."""

import pytest

from milepost.cache import Cache, Kind
from milepost.cache.eviction import Score, score
from milepost.cache.eviction.score import GROWTH_REQUESTS, PRIOR_GROWTH
from milepost.cache.tree.nodes import NO_PAGE, Checkpoint, End, Node, Reservation
from tests.invariants import check

PAGE_SIZE = 16


def prompt(seed, num_pages=4):
    return [seed] * (num_pages * PAGE_SIZE)


def run(cache, tokens):
    """Admit and compute a prompt in one step, and keep the state at its end."""
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain))
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)
    return allocation.report.reused


def cached(cache, tokens):
    return cache.match(cache.chain([*tokens, 0])).state_length


@pytest.fixture
def cache():
    """Room for three prompts of four pages."""
    return Cache(num_pages=12, num_slots=40, page_size=PAGE_SIZE)


def test_what_is_waited_for_outlives_what_is_fresher(cache):
    for seed in (1, 2, 3):
        run(cache, prompt(seed))
    reservation = cache.expect(cache.chain([*prompt(1), 0]), num_ahead=2)
    for seed in (4, 5, 6):
        run(cache, prompt(seed))
    assert cached(cache, prompt(1)) == 64
    assert sum(cached(cache, prompt(seed)) > 0 for seed in range(2, 7)) == 2
    cache.forget(reservation)
    for seed in (7, 8, 9):
        run(cache, prompt(seed))
    assert cached(cache, prompt(1)) == 0


def test_of_two_waiting_the_last_in_the_queue_gives_way(cache):
    for seed in (1, 2, 3):
        run(cache, prompt(seed))
    for num_ahead, seed in enumerate((3, 2, 1)):
        cache.expect(cache.chain([*prompt(seed), 0]), num_ahead)
    run(cache, prompt(4))
    assert [cached(cache, prompt(seed)) for seed in (1, 2, 3)] == [0, 64, 64]


def test_a_reservation_passes_to_the_next_shallower_checkpoint():
    cache = Cache(num_pages=20, num_slots=40, page_size=PAGE_SIZE)
    run(cache, prompt(1))
    run(cache, prompt(1, 8))
    reservation = cache.expect(cache.chain([*prompt(1, 8), 0]), num_ahead=0)
    assert reservation.checkpoint.position == 8 * PAGE_SIZE
    while reservation.checkpoint.position == 8 * PAGE_SIZE:
        cache.reclaimer.evict_checkpoint(reservation.checkpoint, "slots")
        check(cache)
    assert 0 < reservation.checkpoint.position < 8 * PAGE_SIZE
    assert cache.reset()
    assert reservation.checkpoint is None
    cache.forget(reservation)


def test_a_refresh_finds_what_was_made_in_the_meantime(cache):
    chain = cache.chain([*prompt(1), 0])
    reservation = cache.expect(chain, num_ahead=0)
    assert reservation.checkpoint is None
    run(cache, prompt(1))
    cache.refresh(reservation, cache.match(chain))
    assert reservation.checkpoint.position == 64


def displaced(cache, tokens):
    return cache.displaced(cache.match(cache.chain(tokens)))


def test_what_is_likely_to_return_is_displaced_by_a_newcomer(cache, monkeypatch):
    """Asking changes nothing."""
    monkeypatch.setattr(score, "PRIOR_GROWTH", 0.0)
    for seed in (1, 2, 3):
        run(cache, prompt(seed))
    before = cache.stats.pages_evicted, cache.reclaimer.version
    assert displaced(cache, prompt(4)) == 64, "all is in use"
    assert displaced(cache, prompt(4, 2)) == 32
    assert displaced(cache, [*prompt(1), 0]) == PAGE_SIZE, "its own pages are cached"
    assert (cache.stats.pages_evicted, cache.reclaimer.version) == before


def test_nothing_is_displaced_where_nothing_returns(cache):
    for seed in range(1, 200):
        run(cache, prompt(seed))
    assert displaced(cache, prompt(999)) == 0


def test_a_newcomer_leaves_room_for_what_known_paths_grow_by():
    """A fifth of them at most."""
    cache = Cache(num_pages=210, num_slots=40, page_size=PAGE_SIZE)
    run(cache, prompt(1, 100))
    assert displaced(cache, prompt(2, 100)) == 10 * PAGE_SIZE
    assert displaced(cache, prompt(2, 91)) == PAGE_SIZE
    cache.score._growth = 0.0
    assert displaced(cache, prompt(2, 100)) == 0


def test_a_request_that_goes_on_with_a_path_has_its_part_of_that_room():
    cache = Cache(num_pages=172, num_slots=40, page_size=PAGE_SIZE)
    for seed, num_pages in ((1, 100), (2, 60)):
        run(cache, prompt(seed, num_pages))
    assert displaced(cache, [*prompt(1, 100), 0]) == 0
    assert displaced(cache, prompt(3, 1)) == PAGE_SIZE


def test_how_much_a_request_makes_a_known_path_longer_is_learned(cache):
    tokens = prompt(1, 2)
    for num in range(2 * GROWTH_REQUESTS):
        run(cache, tokens)
        tokens = [*tokens, num, num, num, num] if len(tokens) < 100 else prompt(num, 2)
    before = cache.score.growth(1)
    assert before < PRIOR_GROWTH / 4
    for seed in range(GROWTH_REQUESTS):
        run(cache, prompt(5000 + seed))
    assert cache.score.growth(1) < before / 2, "of what is new nothing was known"


def test_what_is_evicted_while_its_return_waits_says_nothing_of_returns(cache):
    """It has returned, when its request arrived."""
    for seed in (1, 2, 3):
        run(cache, prompt(seed))
    waits = cache.expect(cache.chain([*prompt(1), 0]), num_ahead=2)
    for _ in range(20):
        run(cache, prompt(3))
    level = cache.score._ends.rates._level(0)
    checkpoint = waits.checkpoint
    cache.reclaimer.evict_checkpoint(checkpoint, "slots")
    assert cache.score._ends.rates._level(0) == level
    other = cache.match(cache.chain([*prompt(2), 0])).checkpoint
    cache.reclaimer.evict_checkpoint(other, "slots")
    assert cache.score._ends.rates._level(0) < level


def test_a_return_counts_once_and_when_it_arrives(cache):
    run(cache, prompt(1))
    chain = cache.chain([*prompt(1), *prompt(9, 1)])
    waits = cache.expect(chain, num_ahead=0)
    assert waits.end.num_returns == 1
    for seed in (2, 3):
        run(cache, prompt(seed))
    clock = cache.score.clock
    allocation = cache.admit(chain, cache.match(chain), reservation=waits)
    assert allocation.end is waits.end
    assert (allocation.end.time, cache.score.clock) == (clock + 1, clock + 1)
    cache.forget(waits)
    check(cache)


def test_whoever_waits_longer_has_its_turn_first_however_many_went_before(cache):
    """Turns are counted from the request's arrival, not from the cache's first request."""
    for seed in (1, 2, 3):
        run(cache, prompt(seed))
    first = cache.expect(cache.chain([*prompt(1), 0]), num_ahead=9)
    for _ in range(8):
        run(cache, prompt(3))
    last = cache.expect(cache.chain([*prompt(2), 0]), num_ahead=5)
    assert cache.score.of(first.checkpoint) == 64 / 2
    assert last.due - cache.score.clock == 6
    for seed in (4, 5):
        run(cache, prompt(seed))
    assert [cached(cache, prompt(seed)) for seed in (1, 2)] == [64, 0]


@pytest.mark.parametrize("dues", [(5, 50), (50, 5)])
def test_the_first_to_have_its_turn_counts(dues):
    """Whoever came first to wait."""
    score = Score(num_slots=4, grid=64)
    root = Node(b"", NO_PAGE, None, b"")
    checkpoint = Checkpoint(
        position=640,
        slot=1,
        node=root,
        kind=Kind.MARK,
        tail=b"",
        tail_page=None,
        end=End(position=640, time=0),
    )
    for due in dues:
        Reservation(due=due).move(checkpoint)
    assert score.of(checkpoint) == 640 / 5
