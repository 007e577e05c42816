"""Products of one row with FP8 weights on Hopper, in Gluon (see `gemv_parts`): reading the weights
is what costs. The row is a step's only one, or that of each routed token of a few.

Experts have two launches. The first makes a routed token's activations; a program of the second
has all of a token's experts, one after the other along the inputs, and adds them up. Its weights
are on their way while the first products still run.

Legend: T tokens, I inputs, O outputs, X experts, N experts of a token, P = T * N routed tokens, S
units of an expert, H hidden size, B blocks of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper import gemv_parts as parts
from milepost.kernels.products.portable.weights import WeightTensors
from milepost.kernels.products.run import Multiplication, RoutedRows

_HELD, _DOWN_HELD = 4, 5
"""Blocks of a row that a thread holds at a time; half as many if it has two rows, gate and up."""
_TILE, _BLOCK = gl.constexpr(parts.TILE), gl.constexpr(BLOCK)


def run(given: Multiplication, tiles: None) -> Tensor:
    """Multiplies one row by FP8 weights. Gates and ups are the halves of gated ones."""
    weight, output, is_gated = given.weight_as(Fp8), given.output(), given.is_gated
    how = {"is_gated": is_gated, "is_active": is_gated, "held": _HELD // (1 + is_gated)}
    shape = parts.RowShape.of(weight, output.shape[1], **how)
    _launch(given.values, None, weight, given.bias, output, shape)
    return output


def run_experts(routed: RoutedRows) -> Tensor:
    """Returns partials [T, 1, H], in which a token's experts are added up."""
    (num_tokens, num_chosen), size = routed.experts.shape, routed.size
    (up, down), is_gated = routed.weights(Fp8), routed.is_gated
    active, output = routed.values.new_empty(routed.num_routed, size), routed.new_output(1)
    how = {"is_gated": is_gated, "is_active": True, "held": _HELD // (1 + is_gated)}
    shape = parts.RowShape.of(up, size, top_k=num_chosen, limit=routed.limit, **how)
    # The next kernel may read the experts, and anything made with them, at once.
    _launch(routed.values, routed.experts, up, None, active, shape)
    num_outputs = output.shape[-1]
    shape = parts.RowShape.of(down, num_outputs, num_chosen, top_k=num_chosen, held=_DOWN_HELD)
    _down_kernel[(cdiv(num_outputs, parts.TILE), num_tokens)](
        active,
        routed.routing_weights,
        routed.experts,
        _bytes_of(down),
        output,
        SHAPE=shape,
        num_warps=parts.PARTS,
        **OVERLAPPED,
    )
    return output


def _bytes_of(weight: Fp8) -> WeightTensors:
    return WeightTensors(weight.values.view(torch.uint8), weight.scales)


def _launch(
    rows: Tensor,
    experts: Tensor | None,
    weight: Fp8,
    bias: Tensor | None,
    output: Tensor,
    shape: parts.RowShape,
) -> None:
    """Fills `output`, of one row or of each routed token."""
    num_rows = 1 if experts is None else experts.numel()
    _row_kernel[(cdiv(shape.outputs, parts.TILE), num_rows)](
        rows,
        experts,
        _bytes_of(weight),
        bias,
        output,
        rows.stride(0),
        SHAPE=shape,
        num_warps=parts.PARTS,
        **OVERLAPPED,
    )


@quick
@gluon.jit
def _row_kernel(hidden, experts, weight, bias, output, stride, SHAPE: gl.constexpr):
    """Computes a tile of outputs of one row; with gates, one of gates and one of ups, which stand
    after all gates."""
    HALVES: gl.constexpr = 2 if SHAPE.is_gated else 1
    B: gl.constexpr = SHAPE.part_blocks
    number = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) * _TILE
    numbers, p_scale = weight.numbers, 0
    if experts is not None:
        # Waits first, since the next kernel may read the chosen experts as it begins.
        wait_for_inputs()
        launch_dependents()
        expert = gl.load(experts + number).to(gl.int64)
        row_blocks = parts.load_row(hidden + number // SHAPE.top_k * stride, SHAPE)
        # The barrier keeps the loads of the expert and the row ahead of it: the compiler would load
        # the row where it is used.
        thread_barrier()
        kept, sums = parts.keep_blocks(row_blocks)
        numbers += expert * (HALVES * SHAPE.outputs * SHAPE.blocks * _BLOCK)
        HEIGHT: gl.constexpr = (HALVES * SHAPE.outputs + SHAPE.scale_rows - 1) // SHAPE.scale_rows
        p_scale = expert * (HEIGHT * SHAPE.depths)
    else:
        launch_dependents()
    row, part = parts.rows_of(HALVES * _TILE, parts.operand_layout())
    row = row // _TILE * SHAPE.outputs + (first + row % _TILE) % SHAPE.outputs
    starts = ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, SHAPE.blocks - 1)
        starts += (numbers + row.to(gl.int64) * (SHAPE.blocks * _BLOCK) + block * _BLOCK,)
    held = parts.load_blocks(starts, 0, SHAPE)
    row, part = parts.rows_of(HALVES * _TILE, parts.PRODUCTS)
    row = row // _TILE * SHAPE.outputs + (first + row % _TILE) % SHAPE.outputs
    scale = ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, SHAPE.blocks - 1)
        place = p_scale + row // SHAPE.scale_rows * SHAPE.depths + block
        scale += (gl.load(weight.scales + place).to(gl.float32),)
    if experts is None:
        wait_for_inputs()
        kept, sums = parts.keep_blocks(parts.load_row(hidden, SHAPE))
    # Loads of all weights are issued ahead of this barrier, too.
    thread_barrier()
    total = parts.multiply_blocks(held, starts, kept, sums, scale, SHAPE)
    gates, ups = _parted(total, SHAPE.is_gated)
    if SHAPE.is_active:
        ups = activate(ups, gates, SHAPE.is_gated, SHAPE.limit)
    b_o = parts.to_outputs(ups)
    o_n = first + parts.outputs_of(_TILE)
    if bias is not None:
        b_o += gl.load(bias + o_n, mask=o_n < SHAPE.outputs, other=0.0).to(gl.float32)
    place = output + number * SHAPE.outputs + o_n
    gl.store(place, b_o.to(output.dtype.element_ty), mask=o_n < SHAPE.outputs)


@gluon.jit
def _parted(total, GATED: gl.constexpr):
    """Returns gates and ups [1, TILE], which are the same without gates."""
    if GATED:
        return gl.split(gl.permute(gl.reshape(total, [2, 1, _TILE]), (1, 2, 0)))
    else:
        return total, total


@quick
@gluon.jit
def _down_kernel(active, routing_weights, experts, weight, output, SHAPE: gl.constexpr):
    """Computes a tile of one token's outputs: the weighted sum of its experts' down projections."""
    launch_dependents()
    OUTPUTS: gl.constexpr = SHAPE.outputs
    B: gl.constexpr = SHAPE.part_blocks
    EACH: gl.constexpr = SHAPE.blocks // SHAPE.top_k
    token = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) * _TILE
    # Experts were chosen before the kernel ahead let this one start, but nearby caches may not have
    # them yet.
    experts += token * SHAPE.top_k
    routing_weights += token * SHAPE.top_k
    row, part = parts.rows_of(_TILE, parts.operand_layout())
    row = (first + row) % OUTPUTS
    starts = ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, SHAPE.blocks - 1)
        expert = gl.load(experts + block // EACH, cache_modifier=".cg").to(gl.int64)
        place = ((expert * OUTPUTS + row) * EACH + block % EACH) * _BLOCK
        starts += (weight.numbers + place,)
    held = parts.load_blocks(starts, 0, SHAPE)
    row, part = parts.rows_of(_TILE, parts.PRODUCTS)
    row = (first + row) % OUTPUTS
    HEIGHT: gl.constexpr = (OUTPUTS + SHAPE.scale_rows - 1) // SHAPE.scale_rows
    scale = ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, SHAPE.blocks - 1)
        expert = gl.load(experts + block // EACH, cache_modifier=".cg").to(gl.int64)
        share = gl.load(routing_weights + block // EACH, cache_modifier=".cg").to(gl.float32)
        place = (expert * HEIGHT + row // SHAPE.scale_rows) * SHAPE.depths
        place += block % EACH
        scale += (gl.load(weight.scales + place).to(gl.float32) * share,)
    wait_for_inputs()
    kept, sums = parts.keep_row(active + token * (SHAPE.blocks * _BLOCK), SHAPE)
    total = parts.multiply_blocks(held, starts, kept, sums, scale, SHAPE)
    b_o = parts.to_outputs(total).to(output.dtype.element_ty)
    o_n = first + parts.outputs_of(_TILE)
    gl.store(output + token * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)
