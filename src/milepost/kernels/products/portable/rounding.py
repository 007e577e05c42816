"""Triton: rounds activations to float8 or int8, for products that do not round on the way, and adds
them up over the groups of four-bit weights, for zero points.

On chips without arithmetic in float8 rows stay as they are; only Triton's interpreter rounds them
without it, and multiplies the same numbers in float16.

Legend: R rows, I inputs, D scales of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.emit import (
    LINE,
    Activations,
    Fp8Rows,
    Inputs,
    as_activations,
    values_of,
)
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import (
    activate,
    decode,
    encode,
    int8_scales,
    round_int8,
    scale_of,
)
from milepost.kernels.platform.tensors import FP8, cdiv, next_power_of_2
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.forms.quantised import BLOCK, FP4_LANE, Fp8, Int4, Int8, Quantised
from milepost.kernels.products.forms.w4a4 import E2M1_MAX, W4A4

RoundedRows = tuple[Tensor, Tensor | None]
"""Rows with their scales [D, R] if they are rounded, with their sums for four-bit weights, or with
None."""
_PART = 2048
"""Inputs of a program, unless more share a scale."""


def readable(values: Tensor, chip: Chip) -> Tensor:
    """Returns FP8 values as kernels take them: as uint8 if the chip has no FP8 arithmetic."""
    return values if values.dtype != FP8 or chip.has_fp8 else values.view(torch.uint8)


def quantise(
    rows: Tensor,
    depth: int,
    chip: Chip,
    *,
    num_padded: int = 0,
    is_gated: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Rounds `rows` [R, I] as `forms.quantise_rows` and `quantise_int8` do. Returns values [R, I]
    and their scales [D, R], with rows adjacent, both padded to `num_padded` rows.

    If `is_gated`, `rows` are [R, 2 * I], and SiLU(first half) * second half is rounded.
    """
    num_rows, num_inputs = len(rows), rows.shape[1] // (1 + is_gated)
    count = cdiv(num_inputs, depth)
    num_padded = max(num_padded, num_rows)
    values = rows.new_empty(num_padded, num_inputs, dtype=dtype)
    scales = rows.new_empty(count, num_padded, dtype=torch.float32)
    block = next_power_of_2(depth)
    parts = max(1, min(next_power_of_2(count), _PART // block))
    _quantise_kernel[(num_rows, cdiv(count, parts))](
        rows,
        values.view(torch.uint8) if dtype == FP8 else values,
        scales,
        rows.stride(0),
        scales.stride(0),
        INPUTS=num_inputs,
        DEPTH=depth,
        PARTS=parts,
        BLOCK=block,
        GATED=is_gated,
        NATIVE=chip.has_fp8,
        num_warps=max(1, min(8, parts * block // 512)),
        **OVERLAPPED,
    )
    return values, scales


def round_rows(rows: Inputs, weight: Raw | Quantised, chip: Chip, *, are_few: bool) -> RoundedRows:
    """Returns rows as a GEMM takes them. Many are rounded, or added up, by a launch here; if they
    `are_few` the GEMM does so itself, which costs less than a launch."""
    rows = as_activations(rows)
    if isinstance(weight, W4A4):
        return _round_e2m1(values_of(rows), weight)
    sums = weight.order.is_fixed or not are_few
    if sums and isinstance(weight, Int4) and weight.group >= FP4_LANE:
        values = values_of(rows)
        return values, sum_rows(values, min(weight.group, BLOCK))
    keeps_rows = isinstance(weight, Fp8) and not chip.rounds_to_fp8
    if keeps_rows or not isinstance(weight, Fp8 | Int8) or weight.input_scale is not None:
        return values_of(rows), None
    if isinstance(weight, Int8):
        return quantise(values_of(rows), weight.num_inputs, chip, dtype=torch.int8)
    if weight.depth == BLOCK and rows.fp8 is not None:
        return rows.fp8.filled
    if are_few and weight.depth == BLOCK:
        return values_of(rows), None
    return quantise(values_of(rows), weight.depth, chip)


def round_lines(rows: Inputs, weight: Fp8, chip: Chip) -> tuple[Tensor, Tensor]:
    """Returns FP8 rows [R', I] and their scales [D, R'], with R' padded to whole lines by unfilled
    rows."""
    rows = as_activations(rows)
    if weight.depth == BLOCK and rows.fp8 is not None:
        return rows.fp8.values, rows.fp8.scales
    num_padded = cdiv(len(rows), LINE) * LINE
    return quantise(values_of(rows), weight.depth, chip, num_padded=num_padded)


def gate(gate_up: Tensor, chip: Chip) -> Activations:
    """Returns SiLU(first half) * second half of `gate_up` [T, 2 * I], in FP8 alone."""
    num_tokens = len(gate_up)
    num_padded = cdiv(num_tokens, LINE) * LINE
    values, scales = quantise(gate_up, BLOCK, chip, num_padded=num_padded, is_gated=True)
    fp8 = Fp8Rows(
        values=values, scales=scales, num_rows=num_tokens, dtype=gate_up.dtype, is_alone=True
    )
    return Activations(values=None, fp8=fp8)


@quick
@triton.jit(do_not_specialize=("num_rows",))
def _quantise_kernel(
    rows,
    values,
    scales,
    stride,
    num_rows,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    o_k = tl.arange(0, BLOCK)
    column = o_d[:, None] * DEPTH + o_k[None, :]
    is_input = (o_k < DEPTH)[None, :] & (column < INPUTS)
    b_x = tl.load(rows + i_row * stride + column, mask=is_input, other=0.0).to(tl.float32)
    if GATED:
        p_up = rows + i_row * stride + INPUTS + column
        b_up = tl.load(p_up, mask=is_input, other=0.0).to(tl.float32)
        # Activations have 16 bits before they are rounded, whatever computes them.
        b_x = activate(b_up, b_x, True).to(rows.dtype.element_ty).to(tl.float32)
    if values.dtype.element_ty == tl.int8:
        b_scale, b_factor = int8_scales(tl.max(tl.abs(b_x), 1))
        b_q = round_int8(b_x * b_factor[:, None])
    else:
        b_scale = scale_of(b_x, 1)
        b_q = encode(b_x / b_scale[:, None], NATIVE)
    tl.store(values + i_row * INPUTS + column, b_q, is_input)
    tl.store(scales + o_d * num_rows + i_row, b_scale, mask=o_d * DEPTH < INPUTS)


@triton.jit
def widen(values, NATIVE: tl.constexpr):
    """Returns float8, or its bits, in float32."""
    wide = decode(values, NATIVE).to(tl.float32)
    if not NATIVE:
        wide *= 256.0
    return wide


_ROWS = 16
"""Rows of a program."""


def sum_rows(rows: Tensor, depth: int) -> Tensor:
    """Returns sums [D, R] float32 of each `depth` inputs of `rows` [R, I]."""
    num_rows, num_inputs = rows.shape
    sums = rows.new_empty(num_inputs // depth, num_rows, dtype=torch.float32)
    _sum_kernel[(cdiv(num_rows, _ROWS), len(sums))](
        rows, sums, num_rows, rows.stride(0), DEPTH=depth, ROWS=_ROWS, num_warps=4, **OVERLAPPED
    )
    return sums


@quick
@triton.jit(do_not_specialize=("num_rows",))
def _sum_kernel(rows, sums, num_rows, stride, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    launch_dependents()
    wait_for_inputs()
    i_d, o_m = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = o_m < num_rows
    p_x = rows + o_m.to(tl.int64)[:, None] * stride + i_d * DEPTH + tl.arange(0, DEPTH)[None, :]
    b_x = tl.load(p_x, mask=is_row[:, None], other=0.0)
    tl.store(sums + i_d * num_rows + o_m, tl.sum(b_x.to(tl.float32), 1), mask=is_row)


_E2M1_LARGEST = tl.constexpr(E2M1_MAX)
_E2M1_GROUPS = 64
"""Groups that a program rounds."""


def _round_e2m1(rows: Tensor, weight: W4A4) -> tuple[Tensor, Tensor]:
    """Rounds `rows` [R, I] as `forms.w4a4.round_e2m1` does. Returns codes [R, I / 2], two in a
    byte, and scales [G, R] in bits of float8, or of e8m0 in groups of 32."""
    (num_rows, num_inputs), group = rows.shape, weight.group
    count = num_inputs // group
    codes = rows.new_empty(num_rows, num_inputs // 2, dtype=torch.uint8)
    scales = rows.new_empty(count, num_rows, dtype=torch.uint8)
    _round_e2m1_kernel[(num_rows, cdiv(count, _E2M1_GROUPS))](
        rows,
        codes,
        scales,
        weight.input_factor,
        rows.stride(0),
        num_rows,
        COUNT=count,
        GROUP=group,
        GROUPS=_E2M1_GROUPS,
        num_warps=4,
        **OVERLAPPED,
    )
    return codes, scales


@quick
@triton.jit(do_not_specialize=("num_rows",))
def _round_e2m1_kernel(
    rows,
    codes,
    scales,
    factor,
    stride,
    num_rows,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_group, column = o_g < COUNT, o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_x = tl.load(rows + i_row * stride + column, mask=is_group[:, None], other=0.0).to(tl.float32)
    # As integers, sizes have the order that they have as floats, and NaN is the largest.
    size = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = size.to(tl.float32, bitcast=True)
    is_nan = size > 0x7F800000
    if GROUP == 16:
        b_factor = tl.load(factor)
        bits = encode(tl.div_rn(largest, _E2M1_LARGEST * b_factor), False)
        bits = tl.where(is_nan, 127, bits).to(tl.uint8)
        scale = decode(bits, False).to(tl.float32) * (256.0 * b_factor)
        inverse = tl.div_rn(1.0, tl.where(scale > 0, scale, float("inf")))
    else:
        exponent = tl.maximum(((size + (1 << 21)) >> 23) - 2, 1)
        bits = tl.where(is_nan, 255, exponent).to(tl.uint8)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    b_q = _encode_e2m1(b_x * tl.where(is_nan, 0.0, inverse)[:, None])
    low, high = tl.split(tl.reshape(b_q, [GROUPS, GROUP // 2, 2]))
    target = codes + i_row * (COUNT * GROUP // 2) + o_g[:, None] * (GROUP // 2)
    tl.store(target + tl.arange(0, GROUP // 2)[None, :], low | (high << 4), is_group[:, None])
    tl.store(scales + o_g.to(tl.int64) * num_rows + i_row, bits, is_group)


@triton.jit
def _encode_e2m1(x):
    """Rounds float32 to codes of e2m1, ties to even, as `forms.w4a4.encode_e2m1` does."""
    size, sign = tl.abs(x), (x.to(tl.int32, bitcast=True) >> 28) & 8
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    codes += (size > 2.5).to(tl.int32) + (size >= 3.5) + (size > 5.0)
    return (codes | sign).to(tl.uint8)
