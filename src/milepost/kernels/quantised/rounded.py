"""Rows that were rounded to float8 where they were made, for the products that read them next.

They ride on the tensor that they are roundings of. Views and copies of it do not have them, and
whoever writes to the tensor must not let it be multiplied after.
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
_MOST = 64
"""Of more rows the launch that rounds them does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows:
    """As `triton_rounding.quantise` returns them, in whole lines."""

    values: Tensor
    """[R, I] float8"""
    scales: Tensor
    """[D, R] float32"""


def room_for(num_tokens: int, size: int, like: Tensor) -> RoundedRows | None:
    """Unfilled, for as many rows as products with float8 on Hopper read; None where they round
    rows themselves."""
    if not 1 < num_tokens <= _MOST or size % BLOCK or not runs_gluon(like):
        return None
    padded = -(-num_tokens // LINE) * LINE
    return RoundedRows(
        values=like.new_empty(padded, size, dtype=FP8),
        scales=like.new_empty(size // BLOCK, padded, dtype=torch.float32),
    )


def attach(rows: Tensor, rounded: RoundedRows) -> None:
    """Have `rows` bring their rounding along."""
    rows.rounded = rounded  # type: ignore[attr-defined]


def find(rows: Tensor) -> RoundedRows | None:
    """The rounding that `rows` bring along."""
    rounded = getattr(rows, "rounded", None)
    assert rounded is None or isinstance(rounded, RoundedRows), "nobody else uses the name"
    return rounded
