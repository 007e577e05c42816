"""Lends parts of the cache to outside readers: pinned until they are done."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.cache.memory import Storage
from milepost.cache.tree import Match


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loan:
    """`position` tokens' pages, which may hold more at the end, and their state. Pinned until it is
    given back; nobody writes what it names.
    """

    position: int
    pages: tuple[int, ...]
    slot: int | None
    """None in models without states in slots."""


def lend(storage: Storage, match: Match) -> Loan:
    """Pin what a match would resume from, with the state's own tail even where a full page has its
    KV too: it stays cached as long as the state, and so is no room for others."""
    num_pages, tail = -(-match.state_length // match.path.chain.page_size), match.tail
    pages = (*match.path.pages[: num_pages - len(tail)], *tail)
    storage.pages.pin(pages)
    storage.slots.pin(match.slots)
    return Loan(position=match.state_length, pages=pages, slot=next(iter(match.slots), None))


def take_back(storage: Storage, loan: Loan) -> None:
    """Unpin what was lent."""
    storage.pages.unpin(loan.pages)
    if loan.slot is not None:
        storage.slots.unpin((loan.slot,))
