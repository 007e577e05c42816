"""Sums over ranks, in one launch each: `add_norm` and `add_up` for few rows, `share_norm` for many.

Few (a one-shot all-reduce): each rank writes its rows where all others read them, signals them,
waits for theirs, and adds all up. Many (two-shot: a reduce-scatter and an all-gather): each rank
sends every other rank its share of the rows, adds up its own share and sends the sums to all, so
each row goes over the link twice however many ranks there are. Sums are in the order of the ranks,
and all ranks hold the same bits. `reference` is the definition; the kernels need GPUs that reach
each other's memory.

Legend: T tokens, P partials of this rank, C hidden size, S slots, B rows of a rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SLOTS = 512
"""Most rows. Each has memory of its own, so a rank that is ahead overwrites nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotBuffers:
    """Memory that all ranks reach, and where they are in it."""

    rank: int
    size: int
    values: Tensor
    """[R] int64, the address of each rank's values: [2, S, C] of `dtype`, used in turns."""
    signals: Tensor
    """[R] int64, the address of each rank's signals: [S, R] int32, the last turn of a row that each
    other rank has written."""
    turns: Tensor
    """[S] int32, how often each row has been sent; each rank's own, and the same on all."""
    dtype: torch.dtype
    hidden_size: int

    def holds(self, values: Tensor) -> bool:
        """Whether such rows [T, ..., C] can be sent: each rank reads all others', so more ranks can
        send fewer rows."""
        num_rows = NUM_SLOTS // (self.size - 1)
        return len(values) <= num_rows and values.shape[-1] == self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoShotBuffers:
    """Memory that all ranks reach, for many rows: each row is added up by one rank."""

    rank: int
    size: int
    boxes: Tensor
    """[R] int64, the address of each rank's boxes: [2, R, B, C] of `dtype`, by sender. The first
    hold parts of what this rank adds up, the others the sums of the others' rows."""
    signals: Tensor
    """[R] int64, the address of each rank's signals: [2, B, R] int32, the last turn of a place in
    the boxes that each other rank has written."""
    turns: Tensor
    """[B] int32, as those of `OneShotBuffers`."""
    dtype: torch.dtype
    hidden_size: int

    def holds(self, values: Tensor) -> bool:
        """Whether there is room for such rows [T, ..., C]."""
        num_rows = len(self.turns) * self.size
        return len(values) <= num_rows and values.shape[-1] == self.hidden_size


def mail_bytes(hidden_size: int, dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Bytes of a rank's values and of its signals."""
    return 2 * NUM_SLOTS * hidden_size * dtype.itemsize, NUM_SLOTS * size * 4


def box_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Bytes of a rank's boxes for its own `num_rows`, and of its signals."""
    return 2 * size * num_rows * hidden_size * dtype.itemsize, 2 * num_rows * size * 4


def add_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    mail: OneShotBuffers,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`norm.add_norm` of all ranks' `partials` [T, P, C], where each rank's sum is first rounded to
    the type of `hidden` [T, C]. All ranks call it, in the same order as `add_up`."""
    from milepost.kernels.comm import one_shot

    return one_shot.add_norm(hidden, partials, scale, eps, mail, multiplier)


def share_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    boxes: TwoShotBuffers,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`add_norm` for many rows: one rank adds up each."""
    from milepost.kernels.comm import two_shot

    return two_shot.share_norm(hidden, partials, scale, eps, boxes, multiplier)


def add_up(values: Tensor, mail: OneShotBuffers) -> Tensor:
    """The sum of all ranks' `values` [T, C]."""
    from milepost.kernels.comm import one_shot

    return one_shot.add_up(values, mail)
