"""What may be evicted is in the orders of eviction, whoever pins or unpins it."""

from __future__ import annotations

from milepost.cache import Cache, Kind
from tests.invariants import check

PAGE_SIZE = 16
A, B, C, D = ([seed] * 100 for seed in range(1, 5))


def run(cache, tokens, *, marks=(), kind=Kind.ANSWER_END, is_over=True):
    """Admit and compute a prompt in one step, and release it."""
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain), marks=marks)
    assert allocation is not None
    check(cache)
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    check(cache)
    if is_over:
        cache.release(allocation, kind)
        check(cache)
    return allocation


def test_no_tail_is_copied_where_a_full_page_matches():
    """The page that follows the state holds what the tail does, and more."""
    cache = Cache(num_pages=16, num_slots=4, page_size=PAGE_SIZE, grid=PAGE_SIZE)
    prefix = [*A[:16], *B[:8]]
    run(cache, [*prefix, *C[:16]], marks=(24,), kind=None)
    run(cache, [*prefix, *D[:8]], kind=None)
    chain = cache.chain([*prefix, *D[:8], 6])
    match = cache.match(chain)
    assert (match.state_length, match.kv_length) == (24, 32)
    allocation = cache.admit(chain, match)
    assert (allocation.page_copy, allocation.write_from) == (None, 32)
