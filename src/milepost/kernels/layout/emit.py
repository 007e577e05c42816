"""The rows that a kernel hands on to the products after it: in the model's dtype, in FP8, or both.

The readers of rows are known when a model is put together, and each producer is told then what to
emit. A producer may return values instead of FP8 where that is as fast: for one row, or on a chip
whose products round rows themselves. So a product accepts either form.

Legend: T rows, R rows in whole lines, I inputs, D blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import BLOCK, FP8

LINE = 4
"""torch's scaled GEMM takes rows, and TMA copies scales, in multiples of this."""
FEW = 64
"""Largest number of rows for which some FP8 products read the values and round them on the way."""


class Emit(Enum):
    """The forms of rows that their readers need."""

    VALUES = "values"
    FP8 = "fp8"
    BOTH = "both"

    @staticmethod
    def joined(readers: Iterable[Emit]) -> Emit:
        """Returns the forms that several readers need together."""
        needed = set(readers)
        return needed.pop() if len(needed) == 1 else Emit.BOTH if needed else Emit.VALUES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Rows:
    """Rows rounded to FP8 with a scale per block, padded to whole lines."""

    values: Tensor
    """[R, I] float8_e4m3fn"""
    scales: Tensor
    """[D, R] float32"""
    num_rows: int
    """T; further rows are unfilled."""
    dtype: torch.dtype
    """The rows' type before they were rounded."""
    is_alone: bool = False
    """The rows exist in FP8 only."""

    @property
    def filled(self) -> tuple[Tensor, Tensor]:
        """Values and scales without the rows that fill the last line; the scales' stride is
        larger."""
        return self.values[: self.num_rows], self.scales[:, : self.num_rows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projected:
    """A projection of the row that was computed in the same launch as the row."""

    owner: object
    """The layer that the projection belongs to; other layers read the row."""
    output: Tensor
    """[1, O] with room for all outputs; only those of the last matrix are filled in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activations:
    """Rows that products read, in the forms made by their producer; others are None."""

    values: Tensor | None
    """[T, I] in the model's dtype."""
    fp8: Fp8Rows | None = None
    projected: Projected | None = None

    def __len__(self) -> int:
        # Every launch asks, and `len` of a tensor runs Python code.
        if self.values is not None:
            return self.values.shape[0]
        return self._rounded.num_rows

    @property
    def shape(self) -> torch.Size:
        if self.values is not None:
            return self.values.shape
        return torch.Size((len(self), self._any.shape[1]))

    @property
    def size(self) -> int:
        return self._any.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self._rounded.dtype if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        return self._any.device

    @property
    def is_cuda(self) -> bool:
        return self._any.is_cuda

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns an unfilled tensor beside the rows, in their dtype by default."""
        return self._any.new_empty(*shape, dtype=dtype or self.dtype)

    @property
    def _any(self) -> Tensor:
        if self.values is not None:
            return self.values
        return self._rounded.values

    @property
    def _rounded(self) -> Fp8Rows:
        assert self.fp8 is not None, "rows were made in some form"
        return self.fp8


Inputs = Tensor | Activations
"""A tensor [T, I] stands for rows that were made in the model's dtype alone."""


def as_activations(rows: Inputs) -> Activations:
    """Returns the rows as `Activations`."""
    return rows if isinstance(rows, Activations) else Activations(values=rows)


def values_of(rows: Inputs) -> Tensor:
    """Returns the rows in the model's dtype, for a reader that asked for them."""
    if not isinstance(rows, Activations):
        return rows
    assert rows.values is not None, "who reads values is known when the model is put together"
    return rows.values


def reads_rounded(rows: Inputs) -> bool:
    """Whether FP8 products read rows rounded by their producer: if the chip multiplies FP8."""
    return rows.is_cuda and probe(rows.device).has_fp8


def room_for(
    num_rows: int, size: int, like: Tensor, emit: Emit, *, order: SumOrder = SumOrder.FREE
) -> Fp8Rows | None:
    """Allocates FP8 rows for a producer to fill. Returns None if nobody reads FP8, or if products
    round rows themselves, as those of one row do unless their order is FIXED. More than FEW
    rows exist in FP8 only, if nobody reads values."""
    if emit is Emit.VALUES or size % BLOCK or like.element_size() != 2:
        return None
    if num_rows <= 1 and not (num_rows and order.is_fixed):
        return None
    if not reads_rounded(like):
        return None
    padded = -(-num_rows // LINE) * LINE
    return Fp8Rows(
        values=like.new_empty(padded, size, dtype=FP8),
        scales=like.new_empty(size // BLOCK, padded, dtype=torch.float32),
        num_rows=num_rows,
        dtype=like.dtype,
        is_alone=emit is Emit.FP8 and num_rows > FEW,
    )


def handed_on(values: Tensor, fp8: Fp8Rows | None) -> Inputs:
    """Returns a producer's output: `values` alone, or `fp8` with `values` unless FP8 is alone."""
    if fp8 is None:
        return values
    return Activations(values=None if fp8.is_alone else values, fp8=fp8)


def keeps_values(fp8: Fp8Rows | None) -> bool:
    """Whether a producer has to write the rows' values."""
    return fp8 is None or not fp8.is_alone


def as_arguments(fp8: Fp8Rows | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Returns the arguments of kernels in Triton: the values' bits, the scales, and the stride of a
    row's scales."""
    if fp8 is None:
        return None, None, 0
    return fp8.values.view(torch.uint8), fp8.scales, fp8.scales.stride(0)
