"""Pages of layers with a sliding window. They are in a pool of their own, which holds only pages
that some state needs.

    tokens   0 ..... |----- window -----| p ............. |----- window -----| q
    table    [ HOLE ][ HOLE ][ kept by  ][ HOLE ][ HOLE ][ the request's     ]
                              the state at p

A token reads the KV of the last `window` tokens, its own included. So the state after p tokens
consists of the recurrent layers' states and the pages of the last `window - 1` tokens. A request
holds the pages that its next token reads, and frees each page once no later token reads it. A
checkpoint keeps the pages before its position. A page that several of them need exists once.
Nothing is evicted here: a page is freed with the last state that needs it.
"""

from __future__ import annotations

from milepost.cache.allocation.states import Allocation
from milepost.cache.memory import Pool
from milepost.cache.plans import HOLE, PageCopy


class Windows:
    """The window pages of running requests and of checkpoints. Without a window (0) there are
    none."""

    def __init__(self, window: int, page_size: int, pages: Pool) -> None:
        self._window = window
        self._page_size = page_size
        self._pages = pages

    def begin(self, allocation: Allocation) -> None:
        """Starts a request with its checkpoint's pages. The last one, if it is not full, is copied,
        since the request writes to it. Until then the checkpoint keeps it, which is being read."""
        if allocation.source is None or not self._window:
            return
        position, shared = allocation.source.position, allocation.source.windows
        table = allocation.window_table = [HOLE] * self._first_index(position) + [*shared]
        num_tokens = position % self._page_size
        if shared and num_tokens:
            (table[-1],) = self._pages.allocate(1)
            copy = PageCopy(source=shared[-1], target=table[-1], num_tokens=num_tokens)
            allocation.window_copy, shared = copy, shared[:-1]
        self._pages.pin(shared)

    def extend(self, allocation: Allocation) -> None:
        """Makes the table cover the planned step. There is always room: see `num_window_pages`."""
        if not self._window:
            return
        table = allocation.window_table
        missing = -(-allocation.kv_length // self._page_size) - len(table)
        if missing > 0:
            table += self._pages.allocate(missing)

    def free_passed(self, allocation: Allocation) -> None:
        """Frees the pages that no token after the request's state reads."""
        table = allocation.window_table
        end = min(self._first_index(allocation.state_length), len(table))
        for index in range(end - 1, -1, -1):
            if table[index] == HOLE:
                break
            self._pages.unpin((table[index],))
            table[index] = HOLE

    def keep(self, allocation: Allocation, position: int) -> tuple[int, ...]:
        """Adds cached references to the pages that a state of the request needs at `position`, and
        returns them."""
        end = -(-position // self._page_size)
        found = tuple(allocation.window_table[self._first_index(position) : end])
        found = () if self._window == 1 else found
        self._pages.keep(found)
        return found

    def load(self, allocation: Allocation, position: int) -> tuple[int, ...]:
        """Allocates the pages that a state is loaded into. Until the load is over, the request also
        keeps those that it would have resumed with."""
        num = -(-position // self._page_size) - self._first_index(position)
        page_ids = tuple(self._pages.allocate(num if self._window > 1 else 0))
        allocation.loading_windows = page_ids
        return page_ids

    def loaded(self, allocation: Allocation, position: int) -> None:
        """Replaces the pages that the request began with by the loaded ones."""
        self.release(allocation)
        holes = [HOLE] * self._first_index(position) if self._window else []
        allocation.window_table = [*holes, *allocation.loading_windows]
        allocation.window_copy, allocation.loading_windows = None, ()

    def load_failed(self, allocation: Allocation) -> None:
        """Frees the pages of a load that failed."""
        self._pages.unpin(allocation.loading_windows)
        allocation.loading_windows = ()

    def release(self, allocation: Allocation) -> None:
        """Frees all window pages of a request."""
        self._pages.unpin([page for page in allocation.window_table if page != HOLE])

    def _first_index(self, position: int) -> int:
        """Index of the first page that a token at this position, or a later one, reads."""
        return max(position + 1 - self._window, 0) // self._page_size
