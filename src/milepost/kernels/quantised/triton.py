"""Which kernel multiplies rows by a quantised weight on a GPU, and how it is cut up. Experts:
`triton_mix`.

Legend: T tokens, I inputs, O outputs, S splits along I.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.device import Chip, probe
from milepost.kernels.emit import LINE, Activations, values_of
from milepost.kernels.quantised import (
    triton_gemm,
    triton_gemv,
    triton_rounding,
    triton_unpack,
)
from milepost.kernels.quantised.forms import BLOCK, FourBits, Fp8, Int4, Quantised
from milepost.kernels.quantised.triton_tiles import FEW, MORE, choose_dense, runs_hopper, suits
from milepost.kernels.tiles import choose_split_k

if TYPE_CHECKING:
    from milepost.kernels.quantised.triton_hopper_nibble_rows import NibbleTiles
    from milepost.kernels.quantised.triton_hopper_rows import RowTiles

_HOPPER_WEIGHTS = 1 << 22
"""Weights at least of products of some rows that Hopper's own kernel is fastest for."""
_LIBRARY_ROWS = 64
"""From so many rows on torch's GEMM is as fast as ours, or it is faster to dequantise a matrix."""


def multiply(
    rows: Activations, weight: Quantised, bias: Tensor | None, *, lets_next_start: bool
) -> Tensor | None:
    """`rows` [T, I] times `weight` [O, I], plus `bias` [O]: [T, O], or float32 partials [T, S, O];
    None where there is no kernel for it."""
    if not suits(rows, weight):
        return None
    num_tokens, num_outputs = len(rows), weight.num_outputs
    if num_tokens == 0:
        return rows.new_empty(0, num_outputs)
    chip = probe(rows.device)
    if num_tokens > _LIBRARY_ROWS:
        if isinstance(weight, FourBits):
            product = F.linear(values_of(rows), triton_unpack.unpack(weight, rows.dtype))
            return product if bias is None else product.add_(bias)
        if _library_multiplies(weight, chip):
            return _multiply_by_library(rows, weight, bias, chip)
    split_k = 1
    if cut := _cut_for_hopper(rows, weight, bias, chip):
        split_k = cut.split_k
    elif num_tokens <= MORE.block_m and not _is_row(rows, weight):
        tiles = choose_dense(num_tokens, weight, chip)
        split_k = choose_split_k(num_outputs, rows.size, tiles, chip.num_sms)
    output = _new_output(rows, num_outputs, split_k)
    _multiply(output, rows, weight, bias, chip, overlaps=lets_next_start)
    return output if split_k == 1 else output.transpose(0, 1)


def _new_output(rows: Activations, num_outputs: int, split_k: int) -> Tensor:
    """[T, O], or partials [S, T, O]."""
    if split_k == 1:
        return rows.new_empty(len(rows), num_outputs)
    return rows.new_empty(split_k, len(rows), num_outputs, dtype=torch.float32)


def multiply_into(
    output: Tensor,
    rows: Activations,
    weight: Quantised,
    bias: Tensor | None,
    *,
    lets_next_start: bool,
) -> bool:
    """Whether a kernel made `output` [T, O], whose rows may lie apart, the product."""
    if not suits(rows, weight) or len(rows) == 0:
        return False
    chip = probe(rows.device)
    if len(rows) <= _LIBRARY_ROWS:
        _multiply(output, rows, weight, bias, chip, overlaps=lets_next_start)
        return True
    if not isinstance(weight, Fp8) or not _library_multiplies(weight, chip) or len(rows) % LINE:
        return False
    _multiply_by_library(rows, weight, bias, chip, output)
    return True


def multiply_beside(output: Tensor, rows: Activations, weight: Quantised, raw: Tensor) -> bool:
    """Whether one launch made `output` [T, O + R] what `weight` [O, I] and `raw` [R, I] make of
    `rows`."""
    if not suits(rows, weight) or not isinstance(weight, Fp8):
        return False
    chip = probe(rows.device)
    cut = _cut_for_hopper(rows, weight, None, chip)
    if cut is None:
        return False
    from milepost.kernels.quantised import triton_hopper_rows
    from milepost.kernels.quantised.beside_gluon import Beside

    beside = Beside(rows=values_of(rows), weight=raw)
    if not beside.is_small:
        return False
    values, scales = triton_rounding.round_lines(rows, weight, chip)
    cut = replace(cut, split_k=1)
    triton_hopper_rows.multiply(values, scales, weight, output, cut, chip, beside)
    return True


def multiply_gated(rows: Activations, weight: Quantised) -> Tensor | None:
    """SiLU(gate) * up [T, O] of `rows` [T, I] and `weight` [2 * O, I], whose first half are the
    gates, if one launch does it, else None."""
    if not (suits(rows, weight) and _is_row(rows, weight) and runs_hopper(rows, weight)):
        return None
    if weight.num_outputs % 2:
        return None
    output = rows.new_empty(1, weight.num_outputs // 2)
    _multiply_row(output, values_of(rows), weight, None, probe(rows.device), is_gated=True)
    return output


def _multiply_row(
    output: Tensor,
    row: Tensor,
    weight: Quantised,
    bias: Tensor | None,
    chip: Chip,
    *,
    is_gated: bool,
) -> None:
    """`output` [1, O] by Hopper's own kernels."""
    from milepost.kernels.quantised import triton_hopper_ring, triton_hopper_row

    if isinstance(weight, Fp8) and triton_hopper_ring.suits(weight):
        triton_hopper_ring.multiply(row, weight, bias, output, chip, is_gated=is_gated)
    else:
        triton_hopper_row.multiply(row, weight, bias, output, chip, is_gated=is_gated)


def _multiply(
    output: Tensor,
    rows: Activations,
    weight: Quantised,
    bias: Tensor | None,
    chip: Chip,
    *,
    overlaps: bool,
) -> None:
    """`output` [T, O], or partials [S, T, O], by our kernels."""
    split_k = len(output) if output.dim() == 3 else 1
    if cut := _cut_for_hopper(rows, weight, bias, chip):
        _multiply_rows(output, rows, weight, replace(cut, split_k=split_k), chip)
        return
    if _is_row(rows, weight):
        row = values_of(rows)
        if runs_hopper(rows, weight):
            _multiply_row(output, row, weight, bias, chip, is_gated=False)
        else:
            triton_gemv.multiply(row, weight, bias, output, chip)
        return
    tiles = choose_dense(len(rows), weight, chip)
    are_few = tiles.block_m <= FEW.block_m
    values, scales = triton_rounding.round_rows(rows, weight, chip, are_few=are_few)
    triton_gemm.gemm(
        values, scales, weight, bias, output, tiles, chip, split_k=split_k, overlaps=overlaps
    )


def _cut_for_hopper(
    rows: Activations, weight: Quantised, bias: Tensor | None, chip: Chip
) -> RowTiles | NibbleTiles | None:
    """How Hopper's own kernel cuts the product up; None where it does not do it."""
    if _is_row(rows, weight) or bias is not None or not runs_hopper(rows, weight):
        return None
    if isinstance(weight, Int4):
        from milepost.kernels.quantised import triton_hopper_nibble_rows

        return triton_hopper_nibble_rows.find_tiles(values_of(rows), weight, chip)
    if weight.num_outputs * weight.num_inputs < _HOPPER_WEIGHTS:
        return None
    from milepost.kernels.quantised import triton_hopper_rows

    return triton_hopper_rows.find_tiles(len(rows), weight, chip)


def _multiply_rows(
    output: Tensor,
    rows: Activations,
    weight: Quantised,
    cut: RowTiles | NibbleTiles,
    chip: Chip,
) -> None:
    """`_multiply` by Hopper's own kernels, cut up so."""
    from milepost.kernels.quantised import triton_hopper_nibble_rows, triton_hopper_rows

    if isinstance(cut, triton_hopper_nibble_rows.NibbleTiles):
        assert isinstance(weight, Int4), "the form that is cut so"
        triton_hopper_nibble_rows.multiply(values_of(rows), weight, output, cut)
        return
    assert isinstance(weight, Fp8), "the form that is cut so"
    values, scales = triton_rounding.round_lines(rows, weight, chip)
    triton_hopper_rows.multiply(values, scales, weight, output, cut, chip)


def _is_row(rows: Activations, weight: Quantised) -> bool:
    """Whether it is one row, and matrix-vector products are made of the weight."""
    return len(rows) == 1 and triton_gemv.suits(weight)


def _library_multiplies(weight: Fp8, chip: Chip) -> bool:
    """Whether torch's GEMM takes these blocks: on Hopper alone, and whole lines of scales."""
    is_block = weight.rows == weight.depth == BLOCK
    is_whole = weight.num_inputs % (4 * BLOCK) == 0 and weight.num_outputs % 16 == 0
    return is_block and is_whole and chip.capability == (9, 0) and chip.arch != "cpu"


def _multiply_by_library(
    rows: Activations,
    weight: Fp8,
    bias: Tensor | None,
    chip: Chip,
    output: Tensor | None = None,
) -> Tensor:
    """The product, in `output` if it is given and rows are whole lines of four."""
    num_tokens = len(rows)
    values, scales = triton_rounding.round_lines(rows, weight, chip)
    if output is None or num_tokens != len(values):
        output = rows.new_empty(len(values), weight.num_outputs)
    torch._scaled_mm(
        values,
        weight.values.t(),
        scales.t(),
        weight.scales.t(),
        out_dtype=rows.dtype,
        out=output,
    )
    product = output[:num_tokens]
    return product if bias is None else product.add_(bias)
