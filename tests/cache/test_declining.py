"""States that nobody waits for do not displace what a waiting request will resume from."""

from milepost.cache import Cache, Kind
from milepost.cache.memory import UnifiedPool
from tests.invariants import check

PAGE_SIZE = 64


def prompt(seed, num_pages=4):
    return [seed] * (num_pages * PAGE_SIZE)


def begin(cache, tokens):
    """Admits a prompt and computes it in one step. Returns its allocation and the positions of the
    states that were exported."""
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain))
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    check(cache)
    return allocation, [export.position for export in exports]


def run(cache, tokens):
    allocation, exported = begin(cache, tokens)
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)
    return exported


def test_the_state_at_a_prompts_end_does_not_displace_one_that_is_waited_for():
    cache = Cache(num_pages=40, num_slots=2, page_size=PAGE_SIZE)
    assert run(cache, prompt(1)) == [192], "a slot is free"
    follower = [*prompt(1), 0]
    cache.expect(cache.chain(follower), num_ahead=5)
    assert run(cache, prompt(2)) == []
    assert cache.stats.checkpoints_declined == 1
    assert cache.match(cache.chain(follower)).state_length == 256


def test_the_state_at_a_prompts_end_displaces_what_nobody_waits_for():
    cache = Cache(num_pages=40, num_slots=2, page_size=PAGE_SIZE)
    run(cache, prompt(1))
    assert run(cache, prompt(2)) == [192]
    assert cache.stats.checkpoints_declined == 0


def test_the_slot_of_what_a_running_request_resumed_from_is_not_displaced():
    """The request will leave a newer state in its own slot."""
    pages_each = 2
    cache = Cache(storage=UnifiedPool(10, pages_each), page_size=PAGE_SIZE)
    for seed in (1, 2):
        run(cache, prompt(seed))
    newcomer = cache.chain(prompt(3, 18))
    pages, slot = 4 * PAGE_SIZE, pages_each * PAGE_SIZE
    assert cache.displaced(cache.match(newcomer)) == 2 * (pages + slot)
    begin(cache, [*prompt(2), 0])
    running = 5 * PAGE_SIZE * cache.score.evidence
    assert cache.displaced(cache.match(newcomer)) == pages + slot + running


def running_chat(num_turns):
    """A chat whose next turn runs after so many others; each but the first made it longer."""
    cache = Cache(num_pages=40, num_slots=40, page_size=PAGE_SIZE)
    for num_pages in range(4, 4 + num_turns):
        run(cache, prompt(1, num_pages))
    begin(cache, prompt(1, 4 + num_turns))
    return cache


def test_a_newcomer_leaves_room_for_what_running_requests_grow_by():
    cache = running_chat(8)
    longest, shorter = (cache.chain(prompt(3, cache.room[0] - less)) for less in (0, 3))
    assert cache.displaced(cache.match(longest)) > 0
    assert cache.displaced(cache.match(shorter)) == 0


def test_before_any_return_was_seen_running_requests_need_no_room():
    cache = Cache(num_pages=40, num_slots=40, page_size=PAGE_SIZE)
    begin(cache, prompt(1, 12))
    assert cache.displaced(cache.match(cache.chain(prompt(3, cache.room[0])))) == 0


def test_running_requests_that_will_not_be_continued_need_no_room():
    cache = Cache(num_pages=20, num_slots=40, page_size=PAGE_SIZE)
    for seed in range(100, 200):
        run(cache, prompt(seed))
    begin(cache, prompt(200))
    longest = cache.chain(prompt(3, cache.room[0]))
    assert cache.displaced(cache.match(longest)) == 0
