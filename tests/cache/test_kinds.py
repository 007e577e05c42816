"""Kinds of layers: states beside pages, attention alone, the grid."""

from __future__ import annotations

import pytest

from milepost.cache import ZERO_SLOT, Cache, Kind
from milepost.cache.tree import HYBRID, FullAttention, Recurrent, ShortConvolution, grid_of
from milepost.errors import ConfigError
from milepost.scheduler.scheduler import Scheduler
from tests.invariants import check

PAGE_SIZE = 16
CONVOLUTIONS = (FullAttention(), ShortConvolution(grid=PAGE_SIZE))


def run(cache, allocation, end):
    exports = cache.take_exports(allocation, end)
    written = {allocation.slot_out: end} | {export.slot: export.position for export in exports}
    cache.commit(allocation, end, written)
    check(cache)


def serve(cache, tokens, *, step=10**6):
    """Compute a prompt in chunks; the allocation, and where it began."""
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain))
    check(cache)
    start = allocation.committed
    while allocation.committed < len(chain):
        run(cache, allocation, min(allocation.committed + step, len(chain)))
    return allocation, start


def test_a_models_grid_is_its_kinds():
    assert grid_of(HYBRID) == 64
    assert grid_of((FullAttention(), Recurrent(grid=64), Recurrent(grid=96))) == 192
    cache = Cache(num_pages=4, num_slots=2, kinds=(FullAttention(), Recurrent(grid=256)))
    assert cache.grid == 256
    with pytest.raises(ConfigError, match="use 256 or more"):
        Scheduler(cache, max_num_seqs=1, max_num_batched_tokens=128)


@pytest.mark.parametrize("num_known", [16, 30, 32, 90])
def test_states_beside_pages_resume_at_every_page_boundary(num_known):
    """Without any slot."""
    cache = Cache(num_pages=16, num_slots=0, page_size=PAGE_SIZE, kinds=CONVOLUTIONS)
    allocation, start = serve(cache, range(100))
    assert (start, allocation.slot_in, allocation.slot_out) == (0, ZERO_SLOT, ZERO_SLOT)
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)
    allocation, start = serve(cache, [*range(num_known), *range(1000, 1040)])
    assert start == num_known // PAGE_SIZE * PAGE_SIZE
    cache.release(allocation, Kind.ANSWER_END)
    assert cache.match(cache.chain(range(96))).state_length == 80, "one token is computed"


def test_states_beside_pages_go_with_them_the_longest_unused_first():
    cache = Cache(num_pages=8, num_slots=0, page_size=PAGE_SIZE, kinds=CONVOLUTIONS)
    for first in (0, 100):
        cache.release(serve(cache, range(first, first + 48))[0])
    cache.release(serve(cache, range(48))[0])
    cache.release(serve(cache, range(200, 264))[0])
    assert cache.match(cache.chain(range(60))).state_length == 48
    assert cache.match(cache.chain(range(100, 160))).state_length < 48


@pytest.mark.parametrize(("num_tokens", "position"), [(20, 16), (32, 31), (33, 32)])
def test_what_attention_alone_has_cached_can_be_lent(num_tokens, position):
    """A prompt's last token is computed for its logits, so one that fills its pages is resumed
    inside the last of them; that page has no state's tail.
    """
    cache = Cache(num_pages=8, num_slots=0, page_size=PAGE_SIZE, kinds=(FullAttention(),))
    allocation, _ = serve(cache, range(num_tokens))
    cache.release(allocation, Kind.ANSWER_END)
    loan = cache.lend(cache.chain(range(num_tokens)))
    check(cache)
    path = cache.match(cache.chain(range(40))).path
    assert (loan.position, list(loan.pages), loan.slot) == (position, path.pages, None)
    cache.take_back(loan)
    check(cache)
