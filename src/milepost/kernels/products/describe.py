"""Describes which kernels serve a weight, by the number of tokens, for `milepost kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import KernelTable, P

_PROBED = (*range(1, 130), 160, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens that are looked up in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of numbers of tokens that one kernel serves."""

    first: int
    last: int
    kernel: str
    order: str
    refused: str
    """Why the kernel before it in the table does not serve them."""

    @property
    def tokens(self) -> str:
        if self.last == _PROBED[-1]:
            return f"from {self.first}"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


class _Served(NamedTuple):
    kernel: str
    order: str


def spans(table: KernelTable[P], make: Callable[[int], P], chip: Chip) -> list[Span]:
    """Returns which kernels of the table serve the problems that `make` returns for a number of
    tokens."""

    def find(num_tokens: int) -> _Served:
        choice = table.choose(make(num_tokens), chip)
        return _Served(choice.kernel.name, choice.order) if choice else _Served("two launches", "")

    def span(first: int, last: int) -> Span:
        refused = list(table.refusals(make(first), chip))
        reason = f"{refused[-1][0].name}: {refused[-1][1]}" if refused else ""
        return Span(first=first, last=last, **find(first)._asdict(), refused=reason)

    starts = [_PROBED[0], *_changes(find)]
    return [span(first, after - 1) for first, after in pairwise([*starts, _PROBED[-1] + 1])]


def _changes(find: Callable[[int], _Served]) -> Iterator[int]:
    """Yields the numbers of tokens at which another kernel takes over."""
    for before, num_tokens in pairwise(_PROBED):
        served = find(num_tokens)
        if served == find(before):
            continue
        while num_tokens - before > 1:
            middle = (before + num_tokens) // 2
            if find(middle) == served:
                num_tokens = middle
            else:
                before = middle
        yield num_tokens
