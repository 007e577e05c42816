"""What others read of the cache from outside: it stays where it is until they are done."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.cache.memory import Storage
from milepost.cache.tree import Match


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loan:
    """`position` tokens' pages, the last of them a tail's if they end inside one, and their state.
    Pinned until it is given back; nobody writes what it names.
    """

    position: int
    pages: tuple[int, ...]
    slot: int | None
    """None in models without states in slots."""


def lend(storage: Storage, match: Match, page_size: int) -> Loan:
    """Pin what a match would resume from."""
    position, checkpoint = match.state_length, match.checkpoint
    pages = [node.page for node in match.path.nodes[: position // page_size]]
    if position % page_size:
        assert checkpoint is not None, "C3: a state inside a page has its tail"
        assert checkpoint.tail_page is not None, "C3: a state inside a page has its tail"
        pages.append(checkpoint.tail_page)
    slot = checkpoint.slot if checkpoint is not None else None
    storage.pages.pin(pages)
    if slot is not None:
        storage.slots.pin((slot,))
    return Loan(position=position, pages=tuple(pages), slot=slot)


def take_back(storage: Storage, loan: Loan) -> None:
    """Unpin what was lent."""
    storage.pages.unpin(loan.pages)
    if loan.slot is not None:
        storage.slots.unpin((loan.slot,))
