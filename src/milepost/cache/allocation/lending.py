"""Lends parts of the cache to readers outside the engine, and keeps them pinned until they are
returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from milepost.cache.memory import Storage
from milepost.cache.tree import Match


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loan:
    """The pages and the state of a prefix of `position` tokens, pinned until they are returned.
    Nobody writes to them meanwhile. The last page may hold further tokens."""

    position: int
    pages: tuple[int, ...]
    slot: int | None
    """The state's slot; None in models without states in slots."""
    windows: tuple[int, ...] = ()
    """Sliding-window pages of the state. They stay as long as its slot is pinned."""

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,) if self.slot is not None else ()


class Loans:
    """The outstanding loans, and the share of the memory that they hold."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._loans: dict[Loan, None] = {}
        self._pages: Counter[int] = Counter()
        self._slots: Counter[int] = Counter()
        """Lent pages and slots -> number of loans that include them."""
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._loans)

    def __iter__(self) -> Iterator[Loan]:
        return iter(self._loans)

    @property
    def share(self) -> float:
        """The share of the memory that is lent, from 0 to 1: of pages or of slots, whichever is
        larger, or of a unified pool's units."""
        pages = len(self._pages) / max(self._storage.pages.capacity, 1)
        slots = len(self._slots) / max(self._storage.slots.capacity, 1)
        return pages + slots if self._storage.pages_a_slot else max(pages, slots)

    def lend(self, match: Match, most: float) -> Loan | None:
        """Pins what a match would resume from. That includes the state's own tail page, even if a
        full page holds the same KV: it stays cached as long as the state does, so it is no room for
        others. Returns None if the lent share would exceed `most`."""
        num_pages, tail = -(-match.state_length // match.path.chain.page_size), match.tail
        pages = (*match.path.pages[: num_pages - len(tail)], *tail)
        slot = next(iter(match.slots), None)
        windows = () if match.checkpoint is None else match.checkpoint.windows
        loan = Loan(position=match.state_length, pages=pages, slot=slot, windows=windows)
        self._count(loan, 1)
        if self.share > most:
            self._count(loan, -1)
            self.num_refused += 1
            return None
        self._storage.pages.pin(pages)
        self._storage.slots.pin(loan.slots)
        self._loans[loan] = None
        return loan

    def take_back(self, loan: Loan) -> None:
        """Unpins the pages and the slot of a loan."""
        del self._loans[loan]
        self._count(loan, -1)
        self._storage.pages.unpin(loan.pages)
        self._storage.slots.unpin(loan.slots)

    def _count(self, loan: Loan, change: int) -> None:
        for counts, ids in ((self._pages, loan.pages), (self._slots, loan.slots)):
            for id_ in ids:
                counts[id_] += change
                if not counts[id_]:
                    del counts[id_]
