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
    """Memory for running requests. `Cache` describes the methods; one contract test runs for every
    implementation."""

    mode: Mode
    stats: Stats
    grid: int
    """A prefill chunk other than a prompt's last ends at a multiple of this, where a state can be
    kept."""

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest request, with its answer, that can run alone."""
        ...

    @property
    def room(self) -> tuple[int, int]:
        """Numbers of pages and of slots available if everything that is merely cached
        is evicted."""
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
