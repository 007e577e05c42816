"""The interface of the memory that the scheduler runs requests in.

`Cache` implements it, and so may another memory, for a comparison under the same scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from milepost.cache.allocation import Allocation
from milepost.cache.placement import Kind, Mode
from milepost.cache.plans import Export, PageMove
from milepost.cache.report import Stats
from milepost.cache.tree import Chain, Match, Reservation


class PrefixMemory(Protocol):
    """The verbs are described at `Cache`. One contract test runs for each policy's."""

    mode: Mode
    stats: Stats
    grid: int
    """A prefill chunk that isn't a prompt's last ends at a multiple: a state can be kept there."""

    @property
    def capacity(self) -> int:
        """Tokens of the longest request, its answer included, that can run when it is alone."""
        ...

    @property
    def room(self) -> tuple[int, int]:
        """Pages and slots to be had if everything that is only cached gave way."""
        ...

    def match(self, chain: Chain, limit: int | None = None) -> Match: ...

    def expect(self, chain: Chain, num_ahead: int, *, first_time: bool = True) -> Reservation: ...

    def refresh(self, reservation: Reservation, match: Match) -> None: ...

    def forget(self, reservation: Reservation) -> None: ...

    def displaced(self, match: Match) -> float: ...

    def admit(
        self,
        chain: Chain,
        match: Match,
        *,
        marks: tuple[int, ...] = (),
        reservation: Reservation | None = None,
        load_to: int | None = None,
    ) -> Allocation | None: ...

    def extend(self, allocation: Allocation, num_tokens: int) -> bool: ...

    def add_branch_point(self, allocation: Allocation, position: int) -> None: ...

    def take_exports(
        self, allocation: Allocation, end: int, most: int | None = None, num_drafts: int = 0
    ) -> list[Export]: ...

    def take_moves(self) -> tuple[PageMove, ...]: ...

    def reset(self) -> bool: ...

    def commit(self, allocation: Allocation, position: int, written: Mapping[int, int]) -> None: ...

    def release(self, allocation: Allocation, kind: Kind | None = None) -> None: ...
