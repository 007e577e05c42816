"""Triton: products of any number of rows with quantised weights, and `unpack`, which makes a 16-bit
matrix of four-bit ones for GEMMs with enough rows.

Legend: I inputs, O outputs, S splits along I, R rows; N outputs, K inputs of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, FourBits, Quantised
from milepost.kernels.products.portable import float4
from milepost.kernels.products.portable.gemm_step import (
    columns,
    constants,
    dequantise,
    factors,
    input_scales,
    load_scales,
    multiply,
    operands,
    pitch,
)
from milepost.kernels.products.portable.rounding import readable, round_rows
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import FEW, SplitTiles

_BLOCK_N = 64
"""Outputs of a program of `unpack`."""


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


def unpack(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """Returns the weights [..., O, I] of one matrix or a stack, rounded to a 16-bit type."""
    *lead, num_inputs = *weight.packed.shape[:-1], weight.num_inputs
    output = torch.empty(*lead, num_inputs, dtype=dtype, device=weight.packed.device)
    num_rows = output.numel() // num_inputs
    known = constants(weight, probe(output.device))
    _unpack_kernel[(triton.cdiv(num_rows, _BLOCK_N), num_inputs // BLOCK)](
        *operands(weight, probe(output.device)),
        output,
        INPUTS=num_inputs,
        ROWS=num_rows,
        BLOCK_N=_BLOCK_N,
        **{name: known[name] for name in ("BLOCK_K", "GROUP", "DEPTHS")},
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _unpack_kernel(
    packed,
    scales,
    zeros,
    output,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    LANE: tl.constexpr = min(GROUP, 64) if GROUP > 0 else 64
    TYPE: tl.constexpr = output.dtype.element_ty
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (o_n % ROWS).to(tl.int64)
    i_k = tl.program_id(1) * BLOCK_K
    o_x, o_w = columns(BLOCK_K, GROUP)
    p_scale, p_zero = scales + row * DEPTHS, zeros + row * (DEPTHS if GROUP > 0 else 1)
    b_w = tl.load(packed + row[:, None] * (INPUTS // 2) + i_k // 2 + o_w[None, :]).to(tl.int16)
    target = output + row[:, None] * INPUTS + i_k + o_x[None, :]
    mask = (o_n < ROWS)[:, None]
    if GROUP < 0:
        low_scale, high_scale, _ = load_scales(
            p_scale, p_zero, None, ROWS, i_k, INPUTS, BLOCK_K, GROUP, False
        )
        factor = factors(p_zero)[:, None]
        low = (float4.weights(b_w & 15, low_scale, TYPE) * factor).to(TYPE)
        high = (float4.weights(b_w >> 4, high_scale, TYPE) * factor).to(TYPE)
    else:
        low = dequantise(b_w & 15, p_scale, p_zero, i_k, TYPE, BLOCK_K, GROUP)
        high = dequantise(b_w >> 4, p_scale, p_zero, i_k + LANE, TYPE, BLOCK_K, GROUP)
    tl.store(target, low, mask=mask)
    tl.store(target + LANE, high, mask=mask)
