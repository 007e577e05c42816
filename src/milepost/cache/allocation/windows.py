"""Pages of layers with a sliding window: a pool of their own, in which only what some state needs
is held.

    tokens   0 ..... |----- window -----| p ............. |----- window -----| q
    table    [ HOLE ][ HOLE ][ kept by  ][ HOLE ][ HOLE ][ the request's     ]
                              the state at p

A token reads the KV of the last `window` tokens, itself among them. So the state after p tokens is
what recurrent layers make of all, and the pages of the last `window - 1`. A request holds those
before its next token, and frees a page as soon as no later token reads it; a checkpoint keeps those
before its position. A page that several of them need exists once. Nothing is evicted here: a page
goes with the last state that needs it.
"""

from __future__ import annotations

from typing import NamedTuple

from milepost.cache.allocation.states import Allocation
from milepost.cache.memory import Pool
from milepost.cache.plans import HOLE, PageCopy
from milepost.cache.tree import Checkpoint


class WindowStart(NamedTuple):
    """Pages that an allocation starts with."""

    table: list[int]
    copy: PageCopy | None
    pinned: tuple[int, ...]
    """The page that is copied, until it has been."""


NOTHING = WindowStart([], None, ())


class Windows:
    """The pages of the last `window` tokens, of states and of running requests."""

    def __init__(self, window: int, page_size: int, pages: Pool) -> None:
        self._window = window
        self._page_size = page_size
        self._pages = pages

    def begin(self, checkpoint: Checkpoint | None) -> WindowStart:
        """Share the pages of the state to resume from, but for the last one if it is not full: the
        request writes on in a copy. They are held from here on.
        """
        if checkpoint is None:
            return WindowStart([], None, ())
        position, shared = checkpoint.position, checkpoint.windows
        table = [HOLE] * self._first_index(position)
        self._pages.pin(shared)
        num_tokens = position % self._page_size
        if not shared or not num_tokens:
            return WindowStart([*table, *shared], None, ())
        (own,) = self._pages.allocate(1)
        copy = PageCopy(source=shared[-1], target=own, num_tokens=num_tokens)
        return WindowStart([*table, *shared[:-1], own], copy, shared[-1:])

    def extend(self, allocation: Allocation) -> None:
        """Make the table cover the step that is planned. There always is room: see
        `num_window_pages`.
        """
        table = allocation.window_table
        missing = -(-allocation.kv_length // self._page_size) - len(table)
        if missing > 0:
            table += self._pages.allocate(missing)

    def pass_by(self, allocation: Allocation) -> None:
        """Free what no token after the request's state reads."""
        table = allocation.window_table
        end = min(self._first_index(allocation.state_length), len(table))
        for index in range(end - 1, -1, -1):
            if table[index] == HOLE:
                break
            self._pages.unpin((table[index],))
            table[index] = HOLE

    def keep(self, allocation: Allocation, position: int) -> tuple[int, ...]:
        """Keep the pages that a state of the request needs."""
        end = -(-position // self._page_size)
        found = tuple(allocation.window_table[self._first_index(position) : end])
        found = () if self._window == 1 else found
        self._pages.keep(found)
        return found

    def load(self, allocation: Allocation, position: int) -> tuple[int, ...]:
        """Take the pages that a state is loaded into; until it is there, the request keeps what it
        would have resumed from.
        """
        num = -(-position // self._page_size) - self._first_index(position)
        own = tuple(self._pages.allocate(num if self._window > 1 else 0))
        allocation.loading_windows = own
        return own

    def loaded(self, allocation: Allocation, position: int) -> None:
        """Go on with what was loaded, in place of what the request began with."""
        self.release(allocation)
        table = [HOLE] * self._first_index(position)
        allocation.window_table = [*table, *allocation.loading_windows]
        allocation.window_copy, allocation.loading_windows = None, ()

    def load_failed(self, allocation: Allocation) -> None:
        """Give back what nothing was loaded into."""
        self._pages.unpin(allocation.loading_windows)
        allocation.loading_windows = ()

    def end_reading(self, allocation: Allocation) -> None:
        """Let go of the page that the first step has copied."""
        self._pages.unpin(allocation.pinned_window)
        allocation.pinned_window = ()

    def release(self, allocation: Allocation) -> None:
        """Take back all that a request holds."""
        self._pages.unpin([page for page in allocation.window_table if page != HOLE])

    def _first_index(self, position: int) -> int:
        """Index of the first page that a token at this position, or a later one, reads."""
        return max(position + 1 - self._window, 0) // self._page_size
