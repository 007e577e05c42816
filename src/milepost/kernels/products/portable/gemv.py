"""Triton: products of a row with weights of every form, without tensor cores: a program reads some
rows of the weight and multiplies as it goes.

Experts of few tokens are multiplied in this way too: hardly two tokens share an expert, so every
routed token reads its expert's matrices by itself, and nothing has to be grouped first.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I inputs or an
expert's size, O outputs; N outputs of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms import Packed
from milepost.kernels.products.portable import gemv_step
from milepost.kernels.products.portable.row_tiles import GemvTiles, cut_expert_gemv
from milepost.kernels.products.portable.weights import ProductShape, WeightTensors
from milepost.kernels.products.run import Multiplication, RoutedRows


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
        MULTIPLY=gemv_step.choose(weight),
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
