"""Triton: products of a row with weights of every form, without tensor cores: a program reads some
rows of the weight and multiplies as it goes.

Rows are rounded on the way if the form needs that, which saves a launch. Raw and FP8 weights are
multiplied here; `choose_product` knows the functions of other forms.

Experts of few tokens are multiplied in this way too: hardly two tokens share an expert, so every
routed token reads its expert's matrices by itself, and nothing has to be grouped first.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I inputs or an
expert's size, O outputs; K inputs of a step, D blocks of a step, N outputs of a program.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate, decode, encode, scale_of
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms import Packed, Raw
from milepost.kernels.products.forms.quantised import BLOCK, FourBits, Int8, Quantised
from milepost.kernels.products.portable import four_bits_row, int8_step
from milepost.kernels.products.portable.rounding import widen
from milepost.kernels.products.portable.row_tiles import GemvTiles, cut_expert_gemv
from milepost.kernels.products.portable.weights import (
    ProductShape,
    WeightTensors,
    find_both,
    find_row,
)
from milepost.kernels.products.run import Multiplication, RoutedRows

_BLOCK = tl.constexpr(BLOCK)


def run(given: Multiplication, tiles: GemvTiles) -> Tensor:
    """Multiplies rows one at a time by a weight of any form: see `products.run`."""
    hidden, weight, output = given.values, given.weight, given.output()
    assert not isinstance(weight, Packed), "a form of kernels"
    _gemv_kernel[(cdiv(output.shape[-1], tiles.block_n), len(hidden))](
        hidden,
        None,
        None,
        WeightTensors.of(weight, given.chip),
        given.bias,
        output,
        hidden.stride(0),
        output.stride(0),
        MULTIPLY=choose_product(weight),
        SHAPE=ProductShape.of(weight, given.chip, is_gated=given.is_gated, **tiles.sizes),
        num_warps=tiles.num_warps,
        **OVERLAPPED,
    )
    return output


def run_experts(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    output = routed.new_output(routed.experts.shape[1])
    active = routed.values.new_empty(routed.num_routed, routed.size)
    up_tiles, down_tiles = cut_expert_gemv(routed.mixture)
    project(routed.values, routed, active, up_tiles, is_up=True)
    project(active, routed, output, down_tiles, is_up=False)
    return output


def project(
    rows: Tensor, routed: RoutedRows, output: Tensor, tiles: GemvTiles, *, is_up: bool
) -> None:
    """Fills `output` [P, I] with the routed tokens' `rows` [T, H] through `up` and the activation,
    or `output` [P, H] with the routing weights times `rows` [P, I] through `down`."""
    weight, is_gated = routed.up if is_up else routed.down, is_up and routed.is_gated
    top_k = routed.experts.shape[1] if is_up else 1
    tile = {**tiles.sizes, "limit": routed.limit * is_up}
    _gemv_kernel[(cdiv(output.shape[-1], tiles.block_n), routed.num_routed)](
        rows,
        routed.experts,
        None if is_up else routed.routing_weights,
        WeightTensors.of(weight, routed.chip),
        None,
        output,
        rows.stride(0),
        output.stride(-2),
        MULTIPLY=choose_product(weight),
        SHAPE=ProductShape.of(weight, routed.chip, is_gated=is_gated, top_k=top_k, **tile),
        num_warps=tiles.num_warps,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _gemv_kernel(
    rows,
    experts,
    routing_weights,
    weight,
    bias,
    output,
    stride,
    output_stride,
    MULTIPLY: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Computes outputs of one row. Outputs with gates are activated; those of routed tokens are
    activated too, or multiplied by routing weights."""
    launch_dependents()
    o_n = tl.program_id(0) * SHAPE.block_n + tl.arange(0, SHAPE.block_n)
    row = tl.program_id(1)
    column, is_column = o_n % SHAPE.outputs, o_n < SHAPE.outputs
    p_x = rows + (row // SHAPE.top_k).to(tl.int64) * stride
    if experts is None:
        b_o, b_gate = MULTIPLY(p_x, weight, 0, column.to(tl.int64), SHAPE, True)
        if SHAPE.is_gated:
            b_o = activate(b_o, b_gate, True)
    else:
        wait_for_inputs()
        expert = tl.load(experts + row).to(tl.int64)
        if routing_weights is not None:
            # Asked for with the row: after the products a program would wait for it alone.
            routing_weight = tl.load(routing_weights + row).to(tl.float32)
        b_up, b_gate = MULTIPLY(p_x, weight, expert, column, SHAPE, False)
        if routing_weights is None:
            b_o = activate(b_up, b_gate, SHAPE.is_gated, SHAPE.limit)
        else:
            b_o = b_up * routing_weight
    if bias is not None:
        b_o += tl.load(bias + o_n, mask=is_column, other=0.0).to(tl.float32)
    b_o = b_o.to(output.dtype.element_ty)
    tl.store(output + row.to(tl.int64) * output_stride + o_n, b_o, mask=is_column)


def choose_product(weight: Raw | Quantised) -> Any:
    """Returns the device function that multiplies a row by a weight of this form."""
    if isinstance(weight, FourBits):
        return four_bits_row.multiply_row
    if isinstance(weight, Int8):
        return int8_step.multiply_row
    return multiply_raw if isinstance(weight, Raw) else multiply_fp8


@triton.jit
def multiply_raw(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies the row at `p_x` by the weights of outputs `column` [N], and of their gates if
    there are any. Returns the sums of both, [N] each. If EARLY, it waits for inputs once the first
    weights are loaded."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    o_k = tl.arange(0, BLOCK_K)
    p_gate = find_row(weight, expert, column, SHAPE)[0][:, None] + o_k[None, :]
    # Up rows stand after the gates'.
    p_up = p_gate
    if SHAPE.is_gated:
        p_up += SHAPE.outputs * SHAPE.inputs
    ups = tl.zeros([column.shape[0], BLOCK_K], tl.float32)
    gates = ups
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        is_input = i_k + o_k < INPUTS
        if EARLY:
            if SHAPE.is_gated:
                b_gate = tl.load(p_gate + i_k, mask=is_input[None, :], other=0.0)
            b_up = tl.load(p_up + i_k, mask=is_input[None, :], other=0.0)
            if i_k == 0:
                wait_for_inputs()
        # If nothing waits, the row comes first: experts of several steps are read faster so.
        b_x = tl.load(p_x + i_k + o_k, mask=is_input, other=0.0).to(tl.float32)[None, :]
        if not EARLY:
            if SHAPE.is_gated:
                b_gate = tl.load(p_gate + i_k, mask=is_input[None, :], other=0.0)
            b_up = tl.load(p_up + i_k, mask=is_input[None, :], other=0.0)
        if SHAPE.is_gated:
            gates += b_gate.to(tl.float32) * b_x
        ups += b_up.to(tl.float32) * b_x
    return tl.sum(ups, 1), tl.sum(gates, 1)


@triton.jit
def multiply_fp8(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Does `multiply_raw` for FP8, block by block."""
    BLOCKS: tl.constexpr = SHAPE.inputs // _BLOCK
    BLOCK_D: tl.constexpr = SHAPE.block_k // _BLOCK
    gate, up = find_both(weight, expert, column, SHAPE)
    ups = tl.zeros([column.shape[0]], tl.float32)
    gates = ups
    for i_d in tl.static_range(0, BLOCKS, BLOCK_D):
        b_up = _load_weights(up[0], i_d, SHAPE)
        if SHAPE.is_gated:
            b_gate = _load_weights(gate[0], i_d, SHAPE)
        if EARLY and i_d == 0:
            wait_for_inputs()
        b_x = _load_row(p_x, i_d, SHAPE)
        if SHAPE.is_gated:
            gates += _dot(b_gate, b_x, gate[1], i_d, SHAPE)
        ups += _dot(b_up, b_x, up[1], i_d, SHAPE)
    if not SHAPE.has_block_scales:
        gates *= tl.load(gate[1])
        ups *= tl.load(up[1])
    return ups, gates


@triton.jit
def _load_row(p_x, i_d, SHAPE: tl.constexpr):
    """Loads a row's blocks from block `i_d` on, rounded to FP8 and scaled unless weights are
    decoded: [D, BLOCK] float32."""
    o_d, o_k = i_d + tl.arange(0, SHAPE.block_k // _BLOCK), tl.arange(0, _BLOCK)
    is_input = (o_d < SHAPE.inputs // _BLOCK)[:, None]
    place = o_d[:, None] * _BLOCK + o_k[None, :]
    b_x = tl.load(p_x + place, mask=is_input, other=0.0).to(tl.float32)
    if SHAPE.is_decoded:
        return b_x * 256.0  # weights are divided by as much
    else:
        scale = scale_of(b_x, 1)
        # Times its scale here, so that numbers are widened once and not for every output.
        b_q = encode(b_x / scale[:, None], SHAPE.is_native)
        return widen(b_q, SHAPE.is_native) * scale[:, None]


@triton.jit
def _load_weights(p_w, i_d, SHAPE: tl.constexpr):
    """Loads blocks of weights [N, D, BLOCK] of rows at `p_w` [N], from block `i_d` on."""
    o_d, o_k = i_d + tl.arange(0, SHAPE.block_k // _BLOCK), tl.arange(0, _BLOCK)
    place = (o_d[:, None] * _BLOCK + o_k[None, :])[None, :, :]
    if SHAPE.inputs % SHAPE.block_k == 0:
        return tl.load(p_w[:, None, None] + place)
    else:
        is_input = (o_d < SHAPE.inputs // _BLOCK)[None, :, None]
        return tl.load(p_w[:, None, None] + place, mask=is_input, other=0.0)


@triton.jit
def _dot(b_w, b_x, p_scale, i_d, SHAPE: tl.constexpr):
    """Multiplies weights with scales at `p_scale` [N] and a row, both from block `i_d` on: [N]."""
    scale = 1.0
    if SHAPE.has_block_scales:
        o_d = i_d + tl.arange(0, SHAPE.block_k // _BLOCK)
        is_input = (o_d < SHAPE.inputs // _BLOCK)[None, :]
        scale = tl.load(p_scale[:, None] + o_d[None, :], mask=is_input, other=0.0)
    if SHAPE.is_decoded:  # noqa: SIM108
        numbers = decode(b_w, False).to(tl.float32)
    else:
        numbers = widen(b_w, SHAPE.is_native)
    return tl.sum(tl.sum(numbers * b_x[None, :, :], 2) * scale, 1)
