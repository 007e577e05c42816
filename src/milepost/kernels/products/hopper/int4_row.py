"""Products of one row with four-bit weights on Hopper, in Gluon (see `int4_row_parts`): reading the
weights is what costs. The row is a step's only one, or that of each routed token of a few.

Legend: P parts, R rows of a tile, C columns; T tokens, N experts of a token, H hidden size.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms.quantised import Int4
from milepost.kernels.products.hopper import int4_row_parts as parts
from milepost.kernels.products.hopper.tiles import Int4RowTiles, cut_int4_experts
from milepost.kernels.products.portable.weights import WeightTensors
from milepost.kernels.products.run import Multiplication, RoutedRows

_TILE = gl.constexpr(parts.TILE)


def run(given: Multiplication, tiles: Int4RowTiles) -> Tensor:
    """Multiplies one row by four-bit weights. Gates and ups are the halves of gated ones."""
    weight, output = given.weight_as(Int4), given.output()
    shape = parts.Int4RowShape.of(weight, tiles, is_gated=given.is_gated)
    _launch(given.values, None, None, weight, given.bias, output, shape, tiles.parts)
    return output


def run_experts(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    top_k, (up, down) = routed.experts.shape[1], routed.weights(Int4)
    active = routed.values.new_empty(routed.num_routed, routed.size)
    output = routed.new_output(top_k)
    up_tiles, down_tiles = cut_int4_experts(routed.mixture)
    how = {"is_squared": not routed.is_gated, "limit": routed.limit, "top_k": top_k}
    shape = parts.Int4RowShape.of(up, up_tiles, is_gated=routed.is_gated, **how)
    # The next kernel may read the experts, and anything made with them, at once.
    _launch(routed.values, routed.experts, None, up, None, active, shape, up_tiles.parts)
    shape = parts.Int4RowShape.of(down, down_tiles, is_gated=False)
    chosen = routed.experts, routed.routing_weights
    _launch(active, *chosen, down, None, output, shape, down_tiles.parts)
    return output


def _launch(
    rows: Tensor,
    experts: Tensor | None,
    routing_weights: Tensor | None,
    weight: Int4,
    bias: Tensor | None,
    output: Tensor,
    shape: parts.Int4RowShape,
    num_warps: int,
) -> None:
    """Fills `output`, of one row or of each routed token; outputs that have `routing_weights` are
    multiplied by them. A program has a tile or two."""
    num_rows = 1 if experts is None else experts.numel()
    _row_kernel[(cdiv(shape.outputs, shape.width), num_rows)](
        rows,
        experts,
        routing_weights,
        WeightTensors(weight.packed, weight.scales, weight.zeros),
        bias,
        output,
        rows.stride(0),
        SHAPE=shape,
        num_warps=num_warps,
        **OVERLAPPED,
    )


@quick
@gluon.jit
def _row_kernel(rows, experts, routing_weights, weight, bias, output, stride, SHAPE: gl.constexpr):
    """Computes a tile or two of outputs of one row. Those of gates and ups are activated, those of
    experts' last projections are multiplied by routing weights."""
    IS_UP: gl.constexpr = experts is not None and routing_weights is None
    HEIGHT: gl.constexpr = SHAPE.outputs * (2 if SHAPE.is_gated else 1)
    number = gl.program_id(1).to(gl.int64)
    if IS_UP:
        # Waits first, since the next kernel may read the chosen experts as it begins.
        wait_for_inputs()
    launch_dependents()
    first_row, factor = 0, 1.0
    if experts is not None:
        # Experts were chosen before the kernel ahead let this one start, but nearby caches may not
        # have them yet.
        first_row = gl.load(experts + number, cache_modifier=".cg").to(gl.int64) * HEIGHT
    if routing_weights is not None:
        factor = gl.load(routing_weights + number, cache_modifier=".cg").to(gl.float32)
    first = gl.program_id(0) * SHAPE.width
    starts = parts.find_blocks(weight.numbers, first_row, first, SHAPE)
    held = parts.load_blocks(starts, 0, SHAPE)
    scales = parts.load_scales(weight, first_row, first, SHAPE)
    if not IS_UP:
        wait_for_inputs()
    kept = parts.keep_row(rows + number // SHAPE.top_k * stride, SHAPE)
    # Loads of all weights are issued ahead of this barrier.
    thread_barrier()
    totals = parts.multiply(held, starts, scales, kept, SHAPE)
    _store(totals, factor, bias, output + number * SHAPE.outputs, first, SHAPE)


@gluon.jit
def _store(totals, factor, bias, output, first, SHAPE: gl.constexpr):
    """Adds up parts and columns of `totals` [P, R, C], and stores a program's outputs."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_n = first + gl.arange(0, _TILE, LAYOUT)
    if SHAPE.tiles == 1:
        total = gl.sum(gl.sum(totals[0], 2), 0)
        _store_tile(total * factor, bias, output, o_n, SHAPE)
    else:
        both = gl.join(gl.sum(totals[0], 2), gl.sum(totals[1], 2))
        left, right = gl.split(gl.sum(both, 0))
        if SHAPE.is_gated:
            _store_tile(activate(right, left, True, SHAPE.limit), bias, output, o_n, SHAPE)
        else:
            _store_tile(left * factor, bias, output, o_n, SHAPE)
            _store_tile(right * factor, bias, output, o_n + _TILE, SHAPE)


@gluon.jit
def _store_tile(values, bias, output, o_n, SHAPE: gl.constexpr):
    """Stores a tile's outputs, squares of ReLUs if experts have no gates."""
    b_o = gl.convert_layout(values, o_n.type.layout)
    if SHAPE.is_squared and not SHAPE.is_gated:
        b_o = activate(b_o, b_o, False)
    is_output = o_n < SHAPE.outputs
    if bias is not None:
        b_o += gl.load(bias + o_n, mask=is_output, other=0.0).to(gl.float32)
    gl.store(output + o_n, b_o.to(output.dtype.element_ty), mask=is_output)
