"""Sums over ranks, in one launch each: `one_shot` for few rows, `two_shot` for many.

In a one-shot all-reduce each rank writes its rows where all others read them, signals them, waits
for theirs, and adds all up. In a two-shot one (a reduce-scatter and an all-gather) each rank sends
every other rank its share of the rows, adds up its own share and sends the sums to all, so each row
goes over the link twice however many ranks there are. Sums are in the order of the ranks, and all
ranks hold the same bits. `add_up` is the definition, given what every rank has; the kernels need
GPUs that reach each other's memory.

Legend: T tokens, P partials, C hidden size, S slots, B rows of a rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SLOTS = 512
"""Largest number of rows of a one-shot sum. Each has memory of its own, so a rank that is ahead
overwrites nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBuffers:
    """Memory that all ranks reach, and where they are in it."""

    rank: int
    size: int
    values: Tensor
    """[R] int64, the address of each rank's values. One-shot: [2, S, C], used in turns. Two-shot:
    [2, R, B, C], by sender; the first hold parts of what this rank adds up, the others the sums of
    the others' rows."""
    signals: Tensor
    """[R] int64, the address of each rank's signals: int32, the last turn of a place that each
    other rank has written. One-shot: [S, R]; two-shot: [2, B, R]."""
    turns: Tensor
    """[S] or [B] int32, how often each row has been sent; each rank's own, and the same on all."""
    hidden_size: int
    num_rows: int
    """Largest number of rows that can be sent."""

    def holds(self, values: Tensor) -> bool:
        """Whether such rows [T, ..., C] can be sent."""
        return len(values) <= self.num_rows and values.shape[-1] == self.hidden_size


def one_shot_rows(size: int) -> int:
    """Returns the most rows of a one-shot sum: each rank reads all others', so more ranks can send
    fewer."""
    return NUM_SLOTS // (size - 1)


def one_shot_bytes(hidden_size: int, dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Returns the bytes of a rank's values and of its signals."""
    return 2 * NUM_SLOTS * hidden_size * dtype.itemsize, NUM_SLOTS * size * 4


def two_shot_bytes(
    num_rows: int, hidden_size: int, dtype: torch.dtype, size: int
) -> tuple[int, int]:
    """Returns the bytes of a rank's values for its own `num_rows`, and of its signals."""
    return 2 * size * num_rows * hidden_size * dtype.itemsize, 2 * num_rows * size * 4


def add_up(values: Sequence[Tensor]) -> Tensor:
    """Adds up all ranks' `values` [T, C]."""
    total = torch.zeros_like(values[0], dtype=torch.float32)
    for each in values:
        total += each.float()
    return total.to(values[0].dtype)
