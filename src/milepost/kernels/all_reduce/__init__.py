"""Sums over ranks, in one launch each: `add_norm` and `add_up` of few rows, `share_norm` of many.

Few (a one-shot all-reduce): each rank writes its rows where all others read them, tells them, waits
for theirs, and adds all up. Many (a two-shot one, a reduce-scatter and an all-gather): each sends
every other rank the rows that are that one's, adds up its own, and sends all what they come to, so
that each row goes over the link twice however many ranks there are. Sums are in the order of the
ranks, and all hold the same bits. `reference` is the definition; only on
GPUs that reach each other's memory `triton` computes it.

Legend: T tokens, P partials of this rank, C hidden size, S slots, B rows of a rank, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SLOTS = 512
"""Rows at most. Each has memory of its own, so that who is ahead overwrites nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotBuffers:
    """Memory that all ranks reach, and where they are in it."""

    rank: int
    size: int
    values: Tensor
    """[R] int64, the address of each rank's values: [2, S, C] of `dtype`, every other turn's."""
    signals: Tensor
    """[R] int64, the address of each rank's signals: [S, R] int32, the last turn of a row that each
    other rank has written."""
    turns: Tensor
    """[S] int32, how often each row has been sent; this rank's own, and the same on all."""
    dtype: torch.dtype
    hidden_size: int

    def holds(self, values: Tensor) -> bool:
        """Whether such rows [T, ..., C] can be sent: a rank reads all others', so with more ranks
        there may be fewer."""
        num_rows = NUM_SLOTS // (self.size - 1)
        return len(values) <= num_rows and values.shape[-1] == self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoShotBuffers:
    """Memory that all ranks reach, for many rows: each is one rank's to add up."""

    rank: int
    size: int
    boxes: Tensor
    """[R] int64, the address of each rank's boxes: [2, R, B, C] of `dtype`, by who sends. The
    first are for parts of what this rank adds up, the others for what the others' rows come to."""
    signals: Tensor
    """[R] int64, the address of each rank's signals: [2, B, R] int32, the last turn of a place in
    the boxes that each other rank has written."""
    turns: Tensor
    """[B] int32, as those of a `OneShotBuffers`."""
    dtype: torch.dtype
    hidden_size: int

    def holds(self, values: Tensor) -> bool:
        """Whether such rows [T, ..., C] find room."""
        num_rows = len(self.turns) * self.size
        return len(values) <= num_rows and values.shape[-1] == self.hidden_size


def mail_bytes(hidden_size: int, dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Of a rank's values and of its signals."""
    return 2 * NUM_SLOTS * hidden_size * dtype.itemsize, NUM_SLOTS * size * 4


def box_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Of a rank's boxes for so many rows of it, and of its signals."""
    return 2 * size * num_rows * hidden_size * dtype.itemsize, 2 * num_rows * size * 4


def add_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    mail: OneShotBuffers,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`norm.add_norm` of all ranks' `partials` [T, P, C], each rank's rounded to the type of
    `hidden` [T, C] first. Called by all ranks, in the same order as `add_up`."""
    from milepost.kernels.all_reduce import triton

    return triton.add_norm(hidden, partials, scale, eps, mail, multiplier)


def share_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    boxes: TwoShotBuffers,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`add_norm` of many rows, each of which one rank adds up."""
    from milepost.kernels.all_reduce import triton_shared

    return triton_shared.share_norm(hidden, partials, scale, eps, boxes, multiplier)


def add_up(values: Tensor, mail: OneShotBuffers) -> Tensor:
    """The sum of all ranks' `values` [T, C]."""
    from milepost.kernels.all_reduce import triton

    return triton.add_up(values, mail)
