"""Triton: products of any number of rows with quantised weights.

Legend: I inputs, O outputs, S splits along I, R rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.products.forms.quantised import Quantised
from milepost.kernels.products.portable.gemm_step import (
    columns,
    constants,
    input_scales,
    multiply,
    operands,
    pitch,
)
from milepost.kernels.products.portable.rounding import readable, round_rows
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import FEW, SplitTiles


class QuantisedTensors(NamedTuple):
    """The tensors of a quantised weight, on the device; what its form does not have is None."""

    numbers: Any
    scales: Any
    zeros: Any
    """Zero points, or factors of e2m1 rows."""
    input_scale: Any


def run(given: Multiplication, cut: SplitTiles) -> Tensor:
    """Multiplies any number of rows by quantised weights. Few FP8 rows are rounded on the way."""
    weight, chip, tiles, split_k = given.weight, given.chip, cut.tiles, cut.split_k
    assert isinstance(weight, Quantised), "the kernel's forms"
    are_few = tiles.block_m <= FEW.block_m
    rows, row_scales = round_rows(given.rows, weight, chip, are_few=are_few)
    output = given.output(split_k)
    grid = (
        cdiv(weight.num_outputs, tiles.block_n),
        split_k,
        cdiv(len(rows), tiles.block_m),
    )
    _gemm_kernel[grid](
        readable(rows, chip),
        row_scales,
        QuantisedTensors(*operands(weight, chip), input_scales(weight)),
        given.bias,
        output,
        len(rows),
        rows.stride(0),
        0 if row_scales is None else row_scales.stride(0),
        output.stride(-2),
        INPUTS=rows.shape[1],
        OUTPUTS=weight.num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLIT_K=split_k,
        **constants(weight, chip),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **(OVERLAPPED if given.launch_dependents else {}),
    )
    return output if split_k == 1 else output.transpose(0, 1)


@quick
@triton.jit(do_not_specialize=("num_rows", "scales_stride"))
def _gemm_kernel(
    rows,
    row_scales,
    weight,
    bias,
    output,
    num_rows,
    stride,
    scales_stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    SHARE: tl.constexpr = (INPUTS + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = o_m < num_rows
    first = split * SHARE
    o_x, o_w = columns(BLOCK_K, GROUP)
    # Rows beyond the last read row 0 and outputs beyond the last wrap: neither is stored.
    row, column = tl.where(is_row, o_m, 0).to(tl.int64), o_n % OUTPUTS
    p_x = rows + row[:, None] * stride + o_x[None, :]
    p_w = weight.numbers + column.to(tl.int64)[:, None] * pitch(INPUTS, GROUP) + o_w[None, :]
    p_scale = weight.scales + column // SCALE_ROWS * DEPTHS
    p_zero = None
    if weight.zeros is not None:
        p_zero = weight.zeros + column * (DEPTHS if GROUP > 0 else 1)
    p_row_scale = None if row_scales is None else row_scales + row
    static_scale = None if weight.input_scale is None else tl.load(weight.input_scale)
    wait_for_inputs()
    acc = multiply(
        p_x, p_w, p_scale, p_zero, p_row_scale, static_scale, scales_stride,
        first, SHARE, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, BLOCK_SCALES, NATIVE,
    )  # fmt: skip
    if bias is not None:
        b_bias = tl.load(bias + column, mask=(o_n < OUTPUTS) & (split == 0), other=0.0)
        acc += b_bias.to(tl.float32)[:, None]
    target = (split.to(tl.int64) * num_rows + o_m) * output_stride
    mask = is_row[:, None] & (o_n < OUTPUTS)[None, :]
    b_o = tl.trans(acc).to(output.dtype.element_ty)
    tl.store(output + target[:, None] + o_n[None, :], b_o, mask=mask)
