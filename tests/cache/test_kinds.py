"""Kinds of layers: states beside pages, holes behind windows, the grid."""

from __future__ import annotations

import pytest

from milepost.cache import ZERO_SLOT, Cache, Kind
from milepost.cache.plans import HOLE
from milepost.cache.tree import HYBRID, FullAttention, Recurrent, grid_of, window_of
from milepost.cache.tree.kinds import ShortConvolution, SlidingWindow
from milepost.errors import ConfigError
from milepost.scheduler.scheduler import Scheduler
from tests.invariants import check

PAGE_SIZE = 16
CONVOLUTIONS = (FullAttention(), ShortConvolution(grid=PAGE_SIZE))
WINDOWED = (SlidingWindow(window=40), Recurrent(grid=PAGE_SIZE))


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


def test_kv_is_read_as_far_back_as_any_layer_reads_it():
    assert window_of(HYBRID) is None
    assert window_of((FullAttention(), SlidingWindow(window=8))) is None
    assert window_of((SlidingWindow(window=8), SlidingWindow(window=40), Recurrent())) == 40


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


def test_a_table_has_holes_behind_the_window():
    cache = Cache(num_pages=40, num_slots=4, page_size=PAGE_SIZE, kinds=WINDOWED)
    allocation, _ = serve(cache, range(200), step=32)
    first = (200 - 40) // PAGE_SIZE
    assert allocation.page_table[:first] == [HOLE] * first
    assert HOLE not in allocation.page_table[first:]
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)
    assert cache.pages.num_used == 0
    allocation, start = serve(cache, range(260))
    assert start == 200
    assert HOLE not in allocation.page_table[(260 - 40) // PAGE_SIZE :]


def test_pages_behind_the_window_are_free_where_nothing_is_kept():
    cache = Cache(num_pages=40, num_slots=4, page_size=PAGE_SIZE, kinds=WINDOWED, mode="none")
    allocation, _ = serve(cache, range(300))
    for end in range(301, 400):
        assert cache.extend(allocation, end)
        run(cache, allocation, end)
        assert cache.pages.num_used <= 40 // PAGE_SIZE + 2
        first_read = end + 1 - 40
        assert HOLE not in allocation.page_table[first_read // PAGE_SIZE :]
    cache.release(allocation)
    assert cache.pages.num_free == cache.pages.total


def test_a_state_inside_a_page_behind_the_window_keeps_that_page():
    """The step that passes it goes further than the window."""
    cache = Cache(num_pages=16, num_slots=4, page_size=PAGE_SIZE, kinds=WINDOWED)
    chain = cache.chain(range(200))
    allocation = cache.admit(chain, cache.match(chain), marks=(20,))
    tail = allocation.page_table[1]
    run(cache, allocation, 200)
    assert allocation.page_table[1] == HOLE
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)
    match = cache.match(cache.chain([*range(20), 999]))
    assert match.state_length == 20
    assert match.checkpoint.tail_page == tail


def test_a_window_of_some_layers_frees_nothing():
    kinds = (FullAttention(), SlidingWindow(window=40), Recurrent(grid=PAGE_SIZE))
    cache = Cache(num_pages=40, num_slots=4, page_size=PAGE_SIZE, kinds=kinds, mode="none")
    allocation, _ = serve(cache, range(300))
    assert HOLE not in allocation.page_table


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
