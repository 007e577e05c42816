"""States that nobody waits for do not displace what a waiting request will resume from."""

from milepost.cache import Cache, Kind
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
