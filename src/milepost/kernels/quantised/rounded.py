"""Rows that were rounded to float8 where they were made, for the products that read them next.

They ride on the tensor that they are roundings of. Views and copies of it do not have them, and
whoever writes to the tensor must not let it be multiplied after. Where only products with float8
read many rows, the tensor itself may be left unfilled: then its rounding is all there is of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.device import runs_gluon
from milepost.kernels.float8 import FP8
from milepost.kernels.quantised.forms import BLOCK

LINE = 4
"""Rows that torch's GEMM takes at a time; scales that TMA does."""
_FEW = 64
"""Of up to so many rows some products read the rows themselves and round them on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows:
    """As `triton_rounding.quantise` returns them, in whole lines."""

    values: Tensor
    """[R, I] float8"""
    scales: Tensor
    """[D, R] float32"""
    are_alone: bool = False
    """The tensor that they ride on is unfilled."""

    def of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Values and scales without the rows that fill the last line; scales lie apart by more."""
        return self.values[:num_rows], self.scales[:, :num_rows]


def room_for(
    num_tokens: int, size: int, like: Tensor, *, keeps_rows: bool = True
) -> RoundedRows | None:
    """Unfilled, for rows that products with float8 on Hopper read; None where they round rows
    themselves. Unless it `keeps_rows`, many may be alone."""
    is_read = num_tokens > 1 and size % BLOCK == 0 and like.element_size() == 2
    if not is_read or not runs_gluon(like):
        return None
    padded = -(-num_tokens // LINE) * LINE
    return RoundedRows(
        values=like.new_empty(padded, size, dtype=FP8),
        scales=like.new_empty(size // BLOCK, padded, dtype=torch.float32),
        are_alone=num_tokens > _FEW and not keeps_rows,
    )


def attach(rows: Tensor, rounded: RoundedRows) -> None:
    """Have `rows` bring their rounding along."""
    rows.rounded = rounded  # type: ignore[attr-defined]


def find(rows: Tensor) -> RoundedRows | None:
    """The rounding that `rows` bring along."""
    rounded = getattr(rows, "rounded", None)
    assert rounded is None or isinstance(rounded, RoundedRows), "nobody else uses the name"
    return rounded


def as_arguments(rounded: RoundedRows | None) -> tuple[Tensor | None, Tensor | None, int]:
    """What kernels in Triton are told: the values' bits, scales, and how far those of a token lie
    apart."""
    if rounded is None:
        return None, None, 0
    return rounded.values.view(torch.uint8), rounded.scales, rounded.scales.stride(0)


def is_filled(rows: Tensor) -> bool:
    """Whether `rows` hold what they stand for, not their rounding alone."""
    rounded = find(rows)
    return rounded is None or not rounded.are_alone
