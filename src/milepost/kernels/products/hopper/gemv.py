"""Products of one row with quantised weights on Hopper, in Gluon (see `gemv_parts`): reading the
weights is what costs. The row is a step's only one, or that of each routed token of a few.

Legend: T tokens, I inputs, O outputs, X experts, N experts of a token, P = T * N routed tokens, S
units of an expert, B blocks of a part.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.gluon import launch_dependents, thread_barrier, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.quantised import BLOCK, Int4, Quantised
from milepost.kernels.products.hopper.gemv_parts import (
    PARTS,
    TILE,
    keep_blocks,
    load_blocks,
    load_row,
    multiply_blocks,
    outputs_of,
    product_rows,
    scale_place,
    to_outputs,
    weight_rows,
    width_of,
)
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.weights import ProductShape, WeightTensors
from milepost.kernels.products.run_products import Multiplication

_HELD = 4
"""Blocks of a row that a thread holds at a time; half as many of two rows, gate and up."""
_PROGRAMS, _REGISTERS = 3, 80
"""Programs of four bits that share an SM, and registers few enough for them."""
_TILE = gl.constexpr(TILE)


def form_of(weight: Quantised, chip: Chip) -> dict[str, int]:
    """Returns a weight's constants."""
    shape = ProductShape.of(weight, chip, block_n=TILE, block_k=BLOCK)
    return {"GROUP": shape.group, "DEPTHS": shape.depths, "SCALE_ROWS": shape.scale_rows}


def values_of(weight: Quantised, chip: Chip) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns numbers as bytes, scales and zero points."""
    values, scales, zeros, _ = WeightTensors.of(weight, chip)
    return values.view(torch.uint8), scales, zeros


def run(given: Multiplication, tiles: None) -> Tensor:
    """Multiplies one row by quantised weights. Gates and ups are the halves of gated ones."""
    weight, output, is_gated = given.weight, given.output(), given.is_gated
    assert isinstance(weight, Quantised), "the kernel's forms"
    how = {"is_gated": is_gated, "is_active": is_gated}
    _launch(given.values, None, weight, given.bias, output, given.chip, **how)
    return output


def project_up(
    hidden: Tensor,
    experts: Tensor,
    up: Quantised,
    active: Tensor,
    chip: Chip,
    *,
    is_gated: bool,
) -> None:
    """Fills `active` [P, S] with SwiGLU of `up` [X, 2 * S, I] times the routed tokens' `hidden` [T,
    I], or with the squared ReLU of `up` [X, S, I] times them. The next kernel may read `experts`
    [T, N], and anything made with them, at once."""
    _launch(hidden, experts, up, None, active, chip, is_gated=is_gated, is_active=True)


def _launch(
    hidden: Tensor,
    experts: Tensor | None,
    weight: Quantised,
    bias: Tensor | None,
    output: Tensor,
    chip: Chip,
    *,
    is_gated: bool,
    is_active: bool,
) -> None:
    num_blocks = weight.num_inputs // BLOCK
    num_rows, num_outputs = output.shape
    how = _cut(weight, num_outputs, chip, is_gated=is_gated, is_routed=experts is not None)
    _row_kernel[(triton.cdiv(num_outputs, how["TILES"] * TILE), num_rows)](
        hidden,
        experts,
        *values_of(weight, chip),
        bias,
        output,
        hidden.stride(0),
        TOP_K=num_rows // len(hidden),
        BLOCKS=num_blocks,
        OUTPUTS=num_outputs,
        GATED=is_gated,
        ACTIVE=is_active,
        B=triton.cdiv(num_blocks, PARTS),
        **how,
        **form_of(weight, chip),
        num_warps=PARTS,
        **OVERLAPPED,
    )


def _cut(
    weight: Quantised, num_outputs: int, chip: Chip, *, is_gated: bool, is_routed: bool
) -> dict[str, int]:
    """Returns how many tiles a program has, and blocks a thread. Four bits are cut so that all
    programs run at once: most of a program's time passes before it multiplies. Experts have all
    registers."""
    if not isinstance(weight, Int4) or is_gated or is_routed:
        return {"TILES": 1, "HELD": _HELD // (1 + is_gated)}
    tiles = 1 + (triton.cdiv(num_outputs, TILE) > _PROGRAMS * chip.num_sms)
    return {"TILES": tiles, "HELD": _HELD // tiles, "maxnreg": _REGISTERS}


@quick
@gluon.jit
def _row_kernel(
    hidden,
    experts,
    weight,
    scales,
    zeros,
    bias,
    output,
    stride,
    TOP_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVE: gl.constexpr,
    B: gl.constexpr,
    TILES: gl.constexpr,
    HELD: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTHS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
):
    """Computes TILES tiles of outputs of one row; with gates, one of gates and one of ups, which
    stand after all gates."""
    WIDTH: gl.constexpr = width_of(GROUP)
    EACH: gl.constexpr = TILES * _TILE
    HALVES: gl.constexpr = 2 if GATED else 1
    number = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) * EACH
    p_scale = 0
    if experts is not None:
        # In this order: the next kernel may read the chosen experts as it begins.
        wait_for_inputs()
        launch_dependents()
        expert = gl.load(experts + number).to(gl.int64)
        row_blocks = load_row(hidden + number // TOP_K * stride, BLOCKS, B)
        # Both are asked for ahead of it: compilers would ask for the row once they need it.
        thread_barrier()
        kept, sums = keep_blocks(row_blocks, GROUP)
        weight += expert * (HALVES * OUTPUTS * BLOCKS * WIDTH)
        HEIGHT: gl.constexpr = (HALVES * OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS
        p_scale = expert * (HEIGHT * DEPTHS)
    else:
        launch_dependents()
    row, part = weight_rows(HALVES * EACH, GROUP)
    row = row // EACH * OUTPUTS + (first + row % EACH) % OUTPUTS
    starts = ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, BLOCKS - 1)
        starts += (weight + row.to(gl.int64) * (BLOCKS * WIDTH) + block * WIDTH,)
    held = load_blocks(starts, 0, HELD, B, GROUP)
    row, part = product_rows(HALVES * EACH)
    row = row // EACH * OUTPUTS + (first + row % EACH) % OUTPUTS
    scale, zero = (), ()
    for b in gl.static_range(B):
        block = gl.minimum(part * B + b, BLOCKS - 1)
        place = p_scale + row // SCALE_ROWS * DEPTHS + scale_place(block, GROUP)
        scale += (gl.load(scales + place).to(gl.float32),)
        zero += (gl.load(zeros + place) if GROUP else 0,)
    if experts is None:
        wait_for_inputs()
        kept, sums = keep_blocks(load_row(hidden, BLOCKS, B), GROUP)
    # So are all weights.
    thread_barrier()
    total = multiply_blocks(held, starts, kept, sums, scale, zero, B, HELD, GROUP)
    gates, ups = _parted(total, GATED)
    if ACTIVE:
        ups = activate(ups, gates, GATED)
    b_o = to_outputs(ups)
    o_n = first + outputs_of(EACH)
    if bias is not None:
        b_o += gl.load(bias + o_n, mask=o_n < OUTPUTS, other=0.0).to(gl.float32)
    place = output + number * OUTPUTS + o_n
    gl.store(place, b_o.to(output.dtype.element_ty), mask=o_n < OUTPUTS)


@gluon.jit
def _parted(total, GATED: gl.constexpr):
    """Returns gates and ups [1, TILE], which are the same without gates."""
    if GATED:
        return gl.split(gl.permute(gl.reshape(total, [2, 1, _TILE]), (1, 2, 0)))
    else:
        return total, total
