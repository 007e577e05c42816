"""The experts' down projection of FP8 weights and many rows on Hopper, in Gluon, behind
`triton_tall_hopper`.

Legend: B rows of all blocks, P routed tokens, H hidden size, I an expert's size, D scales of a row.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.gluon import launch_dependents, load_box, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.hopper.fp8_grouped_parts import (
    HALF,
    LAYOUT,
    REGISTERS,
    STAGES,
    find_block,
    multiply,
    open_stages,
    skip,
    wait_for_room,
)

_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


def project_down(
    active: Tensor,
    active_scales: Tensor,
    shares: Tensor,
    down: Fp8,
    partials: Tensor,
    groups: Groups,
    chip: Chip,
) -> None:
    """`partials` [P, H], by routed token: `shares` [P] times `active` [B, I], block by block,
    rounded with `active_scales` [D, B], through `down` [X, H, I]."""
    size, num_outputs = active.shape[1], partials.shape[-1]
    _down_kernel[(chip.num_sms,)](
        TensorDescriptor.from_tensor(active, [HALF, BLOCK], LAYOUT),
        active_scales,
        TensorDescriptor.from_tensor(down.values.view(-1, size), [BLOCK, BLOCK], LAYOUT),
        down.scales,
        shares,
        partials,
        groups.order,
        groups.blocks,
        groups.num_blocks,
        active_scales.stride(0),
        groups.blocks.shape[1],
        SIZE=size,
        OUTPUTS=num_outputs,
        PARTS=2 if num_outputs % (2 * BLOCK) == 0 else 1,
        HALF=HALF,
        BLOCK=BLOCK,
        STAGES=STAGES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["scale_stride", "capacity"])
def _down_kernel(
    active,
    active_scales,
    weight,
    scales,
    shares,
    partials,
    order,
    blocks,
    num_blocks,
    scale_stride,
    capacity,
    SIZE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    PARTS: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Each program takes every so many tiles of PARTS blocks of outputs."""
    TILES: gl.constexpr = OUTPUTS // (PARTS * BLOCK)
    STEPS: gl.constexpr = SIZE // BLOCK
    stages = open_stages(weight, HALF, BLOCK, STAGES, PARTS, 1)
    wait_for_inputs()
    launch_dependents()
    num_tiles = gl.load(num_blocks) * TILES
    shared = (blocks, capacity, num_tiles, stages)
    consumed = (active_scales, scale_stride, scales, shares, partials, order)
    gl.warp_specialize(
        [
            (_consume, (shared, consumed, 0, OUTPUTS, TILES, STEPS, STAGES, PARTS)),
            (_consume, (shared, consumed, 1, OUTPUTS, TILES, STEPS, STAGES, PARTS)),
            (_produce, (shared, (active, weight), OUTPUTS, TILES, STEPS, STAGES, PARTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    shared,
    produced,
    OUTPUTS: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Load every step of every tile as soon as there is room."""
    blocks, capacity, num_tiles, stages = shared
    inputs, weights, bars, _ = stages
    active, weight = produced
    HALF: gl.constexpr = inputs.type.shape[1]
    BLOCK: gl.constexpr = inputs.type.shape[2]
    LEAST: gl.constexpr = (HALF + PARTS * BLOCK) * BLOCK
    number = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block = index // TILES
        expert, first_row, end = find_block(blocks, capacity, block)
        first = block * (2 * HALF)
        row = expert * OUTPUTS + index % TILES * (PARTS * BLOCK)
        # An expert's last block is often less than half full: then it has no second half.
        is_tall = end - first_row > HALF
        for step in range(STEPS):
            stage = wait_for_room(number, bars, STAGES)
            bar, at = bars.index(stage), step * BLOCK
            mbarrier.expect(bar, LEAST + HALF * BLOCK, pred=is_tall)
            mbarrier.expect(bar, LEAST, pred=end - first_row <= HALF)
            for part in gl.static_range(PARTS):
                place = weights.index(stage * PARTS + part)
                load_box(weight, [row + part * BLOCK, at], bar, place)
            load_box(active, [first, at], bar, inputs.index(2 * stage))
            load_box(active, [first + HALF, at], bar, inputs.index(2 * stage + 1), pred=is_tall)
            number += 1


@gluon.jit
def _consume(
    shared,
    consumed,
    HALF_TILE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    blocks, capacity, num_tiles, stages = shared
    active_scales, scale_stride, scales, shares, partials, order = consumed
    inputs, _, bars, _ = stages
    HALF: gl.constexpr = inputs.type.shape[1]
    BLOCK: gl.constexpr = inputs.type.shape[2]
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_m = HALF_TILE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, RESULT))
    o_s = HALF_TILE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    number, turn, first_index = 0, 0, gl.program_id(0)
    expert, first_row, end = find_block(blocks, capacity, first_index // TILES)
    for index in range(first_index, num_tiles, gl.num_programs(0)):
        # Looked up a tile ahead: a tile is four steps, and would begin with waiting.
        following = gl.minimum(index + gl.num_programs(0), num_tiles - 1) // TILES
        next_expert, next_row, next_end = find_block(blocks, capacity, following)
        block, tile = index // TILES, index % TILES
        is_tall = end - first_row > HALF
        if first_row + HALF_TILE * HALF < end:
            routed = gl.load(order + gl.minimum(first_row + o_m, end - 1))
            target = gl.load(order + gl.minimum(first_row + o_s, end - 1))
            p_scale = scales + (expert * TILES + tile).to(gl.int64) * (PARTS * STEPS)
            p_row = active_scales + block * (2 * HALF) + o_m
            share = gl.load(shares + routed).to(gl.float32)
            first, second = multiply(
                p_scale, p_scale + (PARTS - 1) * STEPS, p_row, scale_stride,
                number, turn, is_tall, stages, HALF_TILE, STEPS, STAGES, PARTS, RESULT,
            )  # fmt: skip
            column = tile * (PARTS * BLOCK)
            is_row = first_row + o_s < end
            _store(partials, first * share[:, None], target, is_row, column, OUTPUTS)
            if PARTS == 2:
                column += BLOCK
                _store(partials, second * share[:, None], target, is_row, column, OUTPUTS)
        else:
            skip(number, bars, STEPS, STAGES)
        expert, first_row, end = next_expert, next_row, next_end
        number += STEPS
        turn += gl.where(is_tall, STEPS * PARTS, 0)


@gluon.jit
def _store(partials, values, routed, is_row, first_column, OUTPUTS: gl.constexpr):
    """A tile to its routed tokens' rows."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(values.to(partials.dtype.element_ty), STORED)
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))
    target = partials + routed.to(gl.int64)[:, None] * OUTPUTS + column[None, :]
    gl.store(target, values, mask=is_row[:, None])
