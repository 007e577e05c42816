"""The experts' down projection of four-bit weights and many rows on Hopper, in Gluon, behind
`triton_hopper_nibbles_tall`.

Legend: P routed tokens, X experts, H hidden size, I an expert's size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.gluon import launch_dependents, load_box, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.hopper.fp8_grouped_parts import find_block, wait_for_room
from milepost.kernels.products.hopper.int4_grouped_parts import (
    HALF,
    REGISTERS,
    ROWS_LAYOUT,
    STAGES,
    STORED,
    WEIGHTS_LAYOUT,
    consume,
    load_scales,
    multiply,
    open_stages,
)

_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(HALF)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
_BOX = 64
"""Rows that TMA brings at a time."""


def project_down(
    active: Tensor,
    shares: Tensor,
    down: Int4,
    partials: Tensor,
    groups: Groups,
    block_m: int,
    chip: Chip,
) -> None:
    """`partials` [P, H], by routed token: `shares` [P] times the product of `active` [P, I] (by
    `groups.order`) with `down` [X, H, I]."""
    packed = down.packed.view(torch.int16).view(-1, down.num_inputs // 4)
    _down_kernel[(chip.num_sms,)](
        TensorDescriptor.from_tensor(active, [_BOX, HALF], ROWS_LAYOUT),
        TensorDescriptor.from_tensor(packed, [BLOCK, HALF // 2], WEIGHTS_LAYOUT),
        down.scales,
        down.zeros,
        shares,
        partials,
        groups.order,
        groups.blocks,
        groups.num_blocks,
        groups.blocks.shape[1],
        OUTPUTS=partials.shape[-1],
        INPUTS=down.num_inputs,
        GROUP=down.group,
        BLOCK_M=block_m,
        STAGES=STAGES[block_m],
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["capacity"])
def _down_kernel(
    active,
    weight,
    scales,
    zeros,
    shares,
    partials,
    order,
    blocks,
    num_blocks,
    capacity,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Each program takes every so many tiles of two blocks of outputs."""
    WIDE: gl.constexpr = 2 * _BLOCK
    TILES: gl.constexpr = OUTPUTS // WIDE
    MAKE: gl.constexpr = _make
    stages = open_stages(active.dtype, weight, BLOCK_M, STAGES, 1)
    wait_for_inputs()
    launch_dependents()
    shared = (blocks, capacity, gl.load(num_blocks) * TILES, stages)
    target = (partials, shares, order, OUTPUTS)
    gl.warp_specialize(
        [
            (consume, (shared, scales, zeros, target, 0, MAKE, OUTPUTS, _BLOCK, WIDE, TILES,
                       INPUTS, GROUP, STAGES)),
            (consume, (shared, scales, zeros, target, 1, MAKE, OUTPUTS, _BLOCK, WIDE, TILES,
                       INPUTS, GROUP, STAGES)),
            (_produce, (shared, (active, weight), OUTPUTS, WIDE, TILES, INPUTS, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _produce(
    shared,
    produced,
    OUTPUTS: gl.constexpr,
    WIDE: gl.constexpr,
    TILES: gl.constexpr,
    INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load every step of every tile as soon as there is room."""
    blocks, capacity, num_tiles, stages = shared
    inputs, weights, bars = stages
    active, weight = produced
    BLOCK_M: gl.constexpr = inputs.type.shape[1]
    BOX: gl.constexpr = active.block_type.shape[0]
    LEAST: gl.constexpr = 2 * _BLOCK * _HALF + 4 * BOX * _HALF
    STEPS: gl.constexpr = INPUTS // _BLOCK
    number = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, end = find_block(blocks, capacity, index // TILES)
        row = expert * OUTPUTS + index % TILES * WIDE
        # Blocks of few rows have no second box.
        is_tall = end - first_row > BOX
        for step in range(STEPS):
            stage = wait_for_room(number, bars, STAGES)
            bar = bars.index(stage)
            if BLOCK_M > BOX:
                mbarrier.expect(bar, LEAST + 4 * BOX * _HALF, pred=is_tall)
                mbarrier.expect(bar, LEAST, pred=end - first_row <= BOX)
            else:
                mbarrier.expect(bar, LEAST)
            for half in gl.static_range(2):
                at = [row + half * _BLOCK, step * (_HALF // 2)]
                load_box(weight, at, bar, weights.index(2 * stage + half))
                own, column = inputs.index(2 * stage + half), step * _BLOCK + half * _HALF
                load_box(active, [first_row, column], bar, own.slice(0, BOX, 0))
                if BLOCK_M > BOX:
                    rest = own.slice(BOX, BOX, 0)
                    load_box(active, [first_row + BOX, column], bar, rest, pred=is_tall)
            number += 1


@gluon.jit
def _make(
    tile,
    stages,
    held,
    own,
    next_own,
    number,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
    STRIDE: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A tile of outputs, WIDTH rows of it; returns the next tile's first scales."""
    target, first_row, end, column = tile
    partials, shares, order, num_outputs = target
    row = first_row + gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))
    routed = gl.load(order + gl.minimum(row, end - 1))
    first, second = multiply(
        stages, held, own[0], own[1], STRIDE, number, OWN, WIDTH, STEPS, STAGES, GROUP
    )
    held = load_scales(next_own[0], next_own[1], STRIDE, 0)
    share = gl.load(shares + routed).to(gl.float32)
    o_n = column + gl.arange(0, first.shape[0], gl.SliceLayout(1, STORED))
    p_first = partials + routed.to(gl.int64)[None, :] * num_outputs + o_n[:, None]
    is_row = (row < end)[None, :]
    _store(p_first, first, share, is_row)
    _store(p_first + _BLOCK, second, share, is_row)
    return held


@gluon.jit
def _store(p_target, values, share, is_row):
    values = gl.convert_layout(values, p_target.type.layout) * share[None, :]
    gl.store(p_target, values.to(p_target.dtype.element_ty), mask=is_row)
