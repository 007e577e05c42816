"""Quantised experts of so few tokens that each reads its own, on Hopper, in Gluon: `gemv` makes the
up projection, the down projection is here.

A program has all of a token's experts, one after the other along the inputs, and adds them up. Its
weights are on their way while the first products still run.

Legend: T tokens, N experts of a token, X experts, H hidden size, S units of an expert, B blocks of
a part.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.gluon import launch_dependents, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.matrix import RawForm
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.gemv import form_of, project_up, values_of
from milepost.kernels.products.hopper.gemv_parts import (
    PARTS,
    TILE,
    keep_row,
    load_blocks,
    multiply_blocks,
    outputs_of,
    product_rows,
    scale_place,
    to_outputs,
    weight_rows,
    width_of,
)
from milepost.kernels.products.run_experts import RoutedRows

_HELD = 5
"""Number of a row's blocks that a thread holds at a time."""
_TILE, _BLOCK = gl.constexpr(TILE), gl.constexpr(BLOCK)


def run(routed: RoutedRows) -> Tensor:
    """Partials [T, 1, H]: the token's experts are added up."""
    (num_tokens, num_chosen), size, chip = routed.experts.shape, routed.size, routed.chip
    up, down = routed.up, routed.down
    assert not isinstance(up, RawForm), "the kernel's forms"
    assert not isinstance(down, RawForm), "the kernel's forms"
    active = routed.values.new_empty(routed.num_routed, size)
    project_up(routed.values, routed.experts, up, active, chip, is_gated=routed.is_gated)
    output = routed.new_output(1)
    num_outputs, num_blocks = output.shape[-1], num_chosen * (size // BLOCK)
    _down_kernel[(triton.cdiv(num_outputs, TILE), num_tokens)](
        active,
        routed.routing_weights,
        routed.experts,
        *values_of(down, chip),
        output,
        BLOCKS=num_blocks,
        EACH=size // BLOCK,
        OUTPUTS=num_outputs,
        B=triton.cdiv(num_blocks, PARTS),
        HELD=_HELD,
        **form_of(down, chip),
        num_warps=PARTS,
        **OVERLAPPED,
    )
    return output


@quick
@gluon.jit
def _down_kernel(
    active,
    routing_weights,
    experts,
    weight,
    scales,
    zeros,
    output,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    OUTPUTS: gl.constexpr,
    B: gl.constexpr,
    HELD: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTHS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
):
    """Makes a tile of one token's outputs; an expert has EACH blocks."""
    launch_dependents()
    WIDTH: gl.constexpr = width_of(GROUP)
    token = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) * _TILE
    # Who was chosen was so before the kernel ahead let this one start. The caches nearby may not
    # know it yet.
    experts += token * (BLOCKS // EACH)
    routing_weights += token * (BLOCKS // EACH)
    row, part = weight_rows(_TILE, GROUP)
    row = (first + row) % OUTPUTS
    starts = ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, BLOCKS - 1)
        expert = gl.load(experts + block // EACH, cache_modifier=".cg").to(gl.int64)
        starts += (weight + ((expert * OUTPUTS + row) * EACH + block % EACH) * WIDTH,)
    held = load_blocks(starts, 0, HELD, B, GROUP)
    row, part = product_rows(_TILE)
    row = (first + row) % OUTPUTS
    HEIGHT: gl.constexpr = (OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS
    scale, zero = (), ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, BLOCKS - 1)
        expert = gl.load(experts + block // EACH, cache_modifier=".cg").to(gl.int64)
        share = gl.load(routing_weights + block // EACH, cache_modifier=".cg").to(gl.float32)
        place = (expert * HEIGHT + row // SCALE_ROWS) * DEPTHS + scale_place(block % EACH, GROUP)
        scale += (gl.load(scales + place).to(gl.float32) * share,)
        zero += (gl.load(zeros + place) if GROUP else 0,)
    wait_for_inputs()
    kept, sums = keep_row(active + token * (BLOCKS * _BLOCK), BLOCKS, B, GROUP)
    total = multiply_blocks(held, starts, kept, sums, scale, zero, B, HELD, GROUP)
    b_o = to_outputs(total).to(output.dtype.element_ty)
    o_n = first + outputs_of(_TILE)
    gl.store(output + token * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)
