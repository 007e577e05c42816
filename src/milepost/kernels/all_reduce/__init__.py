"""Sums over ranks of few rows: `add_norm` and `add_up`, in one launch each.

Each rank writes its rows where all others can read them, tells them, waits for theirs, and adds all
up in the order of the ranks: so all hold the same bits. `reference` is the definition; only on GPUs
that reach each other's memory `triton` computes it, and larger sums are somebody else's.

Legend: T tokens, P partials of this rank, C hidden size, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SLOTS = 512
"""Rows at most. Each has memory of its own, so that who is ahead overwrites nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
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


def num_value_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Of a rank's values."""
    return 2 * NUM_SLOTS * hidden_size * dtype.itemsize


def num_signal_bytes(size: int) -> int:
    """Of a rank's signals."""
    return NUM_SLOTS * size * 4


def add_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    mail: Mail,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`norm.add_norm` of all ranks' `partials` [T, P, C], each rank's rounded to the type of
    `hidden` [T, C] first. Called by all ranks, in the same order as `add_up`."""
    from milepost.kernels.all_reduce import triton

    return triton.add_norm(hidden, partials, scale, eps, mail, multiplier)


def add_up(values: Tensor, mail: Mail) -> Tensor:
    """The sum of all ranks' `values` [T, C]."""
    from milepost.kernels.all_reduce import triton

    return triton.add_up(values, mail)
