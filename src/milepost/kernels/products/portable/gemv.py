"""Triton: products of a row with weights of every form, without tensor cores: a program reads some
rows of the weight and multiplies as it goes.

Experts of few tokens are multiplied in this way too: hardly two tokens share an expert, so every
routed token reads its expert's matrices by itself, and nothing has to be grouped first. Raw
products of one token come several in a launch: of two rows, and of heads.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I inputs or an
expert's size, O outputs. Where heads are multiplied, H are these.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate, sigmoid
from milepost.kernels.platform.tensors import cdiv, next_power_of_2
from milepost.kernels.products.forms import Packed
from milepost.kernels.products.portable import gemv_step
from milepost.kernels.products.portable.row_tiles import GemvTiles, cut_expert_gemv
from milepost.kernels.products.portable.weights import ProductShape, WeightTensors
from milepost.kernels.products.run import Multiplication, RoutedRows


def run(given: Multiplication, tiles: GemvTiles) -> Tensor:
    """Multiplies rows one at a time by a weight of any form: see `products.run`."""
    hidden, weight, output = given.values, given.weight, given.output()
    assert not isinstance(weight, Packed), "a form of kernels"
    tile = {**tiles.sizes, "is_gated": given.is_gated}
    _gemv_kernel[(cdiv(output.shape[-1], tiles.block_n), len(hidden))](
        hidden,
        None,
        None,
        WeightTensors.of(weight, given.chip),
        given.bias,
        output,
        hidden.stride(0),
        output.stride(0),
        MULTIPLY=gemv_step.choose(weight),
        SHAPE=ProductShape.of(weight, given.chip, **tile),
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
        MULTIPLY=gemv_step.choose(weight),
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


def multiply_heads(hidden: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    """Multiplies `hidden` [1, H, I] by `weight` [H, I, O], head by head, and by the sigmoid of
    `gate` [1, H] if there is one: [1, H, O]. Heads of `hidden` may lie apart; `weight` may be
    transposed in memory."""
    _, num_heads, num_inputs = hidden.shape
    num_outputs = weight.shape[2]
    block_n = max(1, 16384 // next_power_of_2(num_inputs))
    output = hidden.new_empty(1, num_heads, num_outputs)
    _heads_kernel[(cdiv(num_outputs, block_n), num_heads)](
        hidden,
        weight,
        gate,
        output,
        hidden.stride(1),
        *weight.stride(),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_N=block_n,
        BLOCK_K=next_power_of_2(num_inputs),
        num_warps=8,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _heads_kernel(
    hidden,
    weight,
    gate,
    output,
    hidden_stride,
    head_stride,
    input_stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes BLOCK_N outputs of a head."""
    launch_dependents()
    head = tl.program_id(1)
    o_n, o_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_output, is_input = o_n < OUTPUTS, o_k < INPUTS
    at = head * head_stride + o_k[:, None] * input_stride + o_n[None, :] * output_stride
    b_w = tl.load(weight + at, is_input[:, None] & is_output[None, :], 0.0)
    wait_for_inputs()
    b_x = tl.load(hidden + head * hidden_stride + o_k, is_input, 0.0)
    b_o = tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[:, None], 0)
    if gate is not None:
        b_o *= sigmoid(tl.load(gate + head))
    tl.store(output + head * OUTPUTS + o_n, b_o.to(output.dtype.element_ty), is_output)
