"""Experts of four-bit weights and many rows on Hopper, in Gluon: both grouped GEMMs, of which the
up projection is here (see `nibbles_tall_gluon`).

Four warps gather the rows where they lie and have TMA bring the weights, two groups of four
multiply.

Legend: T tokens, N experts of a token, P = T * N routed tokens, X experts, H hidden size, I an
expert's size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.gluon import (
    launch_dependents,
    load_box,
    thread_barrier,
    wait_for_inputs,
)
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.grouping import Groups, group_many
from milepost.kernels.products.hopper.fp8_grouped_parts import find_block, wait_for_room
from milepost.kernels.products.hopper.int4_grouped_down import project_down
from milepost.kernels.products.hopper.int4_grouped_parts import (
    HALF,
    REGISTERS,
    STAGES,
    STORED,
    WEIGHTS_LAYOUT,
    consume,
    load_scales,
    multiply,
    open_stages,
)
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.run_experts import RoutedRows

_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(HALF)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_TILE = 2 * BLOCK
"""Outputs of a tile, gates included."""
_SOME_ROWS = 48
"""Up to so many an expert, blocks have 64 rows (a layer of 257 experts on an H100: with 36 rows 296
us, blocks of 128 315; with 72 rows 442 and 411)."""


def run(routed: RoutedRows) -> Tensor:
    """Partials [T, N, H]."""
    return run_blocks(routed, 64 if routed.rows_each <= _SOME_ROWS else 128)


def run_blocks(routed: RoutedRows, block_m: int) -> Tensor:
    """`run` with blocks of `block_m` rows; the bits do not depend on it."""
    up, down, chip = routed.up, routed.down, routed.chip
    assert isinstance(up, Int4), "the kernel's form"
    assert isinstance(down, Int4), "experts have one form"
    groups = group_many(routed.experts, routed.num_experts, block_m)
    active = routed.values.new_empty(routed.num_routed, routed.size)
    output = routed.new_output(routed.experts.shape[1])
    project_up(routed.values, up, active, groups, block_m, chip, is_gated=routed.is_gated)
    project_down(active, routed.routing_weights, down, output, groups, block_m, chip)
    return output


def project_up(
    hidden: Tensor,
    up: Int4,
    active: Tensor,
    groups: Groups,
    block_m: int,
    chip: Chip,
    *,
    is_gated: bool,
) -> None:
    """`active` [P, I], by `groups.order`: what `up` and the activation make of the rows' tokens
    `hidden` [T, H]."""
    packed = up.packed.view(torch.int16).view(-1, up.num_inputs // 4)
    _up_kernel[(chip.num_sms,)](
        hidden,
        TensorDescriptor.from_tensor(packed, [BLOCK, HALF // 2], WEIGHTS_LAYOUT),
        up.scales,
        up.zeros,
        active,
        groups.order,
        groups.blocks,
        groups.num_blocks,
        hidden.stride(0),
        groups.blocks.shape[1],
        TOP_K=len(active) // len(hidden),
        SIZE=active.shape[1],
        GATED=is_gated,
        INPUTS=up.num_inputs,
        GROUP=up.group,
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
def _up_kernel(
    hidden,
    weight,
    scales,
    zeros,
    active,
    order,
    blocks,
    num_blocks,
    stride,
    capacity,
    TOP_K: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Each program takes every so many tiles: BLOCK activations with the gates beside them, or two
    blocks."""
    HEIGHT: gl.constexpr = 2 * SIZE if GATED else SIZE
    PART: gl.constexpr = SIZE if GATED else _BLOCK
    WIDE: gl.constexpr = _BLOCK if GATED else 2 * _BLOCK
    TILES: gl.constexpr = SIZE // WIDE
    MAKE: gl.constexpr = _make_gated if GATED else _make_squared
    stages = open_stages(hidden.dtype.element_ty, weight, BLOCK_M, STAGES, 2)
    wait_for_inputs()
    launch_dependents()
    shared = (blocks, capacity, gl.load(num_blocks) * TILES, stages)
    target = (active, SIZE)
    gl.warp_specialize(
        [
            (consume, (shared, scales, zeros, target, 0, MAKE, HEIGHT, PART, WIDE, TILES,
                       INPUTS, GROUP, STAGES)),
            (consume, (shared, scales, zeros, target, 1, MAKE, HEIGHT, PART, WIDE, TILES,
                       INPUTS, GROUP, STAGES)),
            (_produce, (shared, (hidden, stride, order, weight), TOP_K, HEIGHT, PART, WIDE, TILES,
                        INPUTS, STAGES)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _produce(
    shared,
    produced,
    TOP_K: gl.constexpr,
    HEIGHT: gl.constexpr,
    PART: gl.constexpr,
    WIDE: gl.constexpr,
    TILES: gl.constexpr,
    INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load every step of every tile as soon as there is room; no rows beyond an expert's. Copies of
    rows are waited for a step later: TMA's signal for weights can't wait for them."""
    blocks, capacity, num_tiles, stages = shared
    inputs, weights, bars = stages
    hidden, stride, order, weight = produced
    STEPS: gl.constexpr = INPUTS // _BLOCK
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, inputs.type.shape[1], layout=gl.SliceLayout(1, COPIED))
    o_k = gl.arange(0, _HALF, layout=gl.SliceLayout(0, COPIED))
    number = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, end = find_block(blocks, capacity, index // TILES)
        row = expert * HEIGHT + index % TILES * WIDE
        token = gl.load(order + gl.minimum(first_row + o_m, end - 1)) // TOP_K
        p_x = hidden + (token.to(gl.int64) * stride)[:, None] + o_k[None, :]
        is_row = (first_row + o_m < end)[:, None]
        for step in range(STEPS):
            stage = wait_for_room(number, bars, STAGES)
            bar = bars.index(stage)
            mbarrier.expect(bar, 2 * _BLOCK * _HALF)
            for part in gl.static_range(2):
                at = [row + part * PART, step * (_HALF // 2)]
                load_box(weight, at, bar, weights.index(2 * stage + part))
            for half in gl.static_range(2):
                p_half = p_x + (step * _BLOCK + half * _HALF)
                place = inputs.index(2 * stage + half)
                async_copy.async_copy_global_to_shared(place, p_half, mask=is_row)
            async_copy.commit_group()
            if number > 0:
                async_copy.wait_group(1)
                _signal(bars.index((number - 1) % STAGES))
            number += 1
    if number > 0:
        async_copy.wait_group(0)
        _signal(bars.index((number - 1) % STAGES))


@gluon.jit
def _signal(bar):
    """All threads' copies have arrived, also for those who read them as TMA does."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _make_gated(
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
    """A tile of activations, WIDTH rows of it; returns the next tile's first scales."""
    gate, up = multiply(
        stages, held, own[0], own[1], STRIDE, number, OWN, WIDTH, STEPS, STAGES, GROUP
    )
    held = load_scales(next_own[0], next_own[1], STRIDE, 0)
    _store(tile, activate(up, gate, True), 0)
    return held


@gluon.jit
def _make_squared(
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
    """The same without gates."""
    first, second = multiply(
        stages, held, own[0], own[1], STRIDE, number, OWN, WIDTH, STEPS, STAGES, GROUP
    )
    held = load_scales(next_own[0], next_own[1], STRIDE, 0)
    _store(tile, activate(first, first, False), 0)
    _store(tile, activate(second, second, False), _BLOCK)
    return held


@gluon.jit
def _store(tile, values, beyond):
    """A part's activations, whose outputs are so many `beyond` the tile's first."""
    target, first_row, end, column = tile
    active, size = target
    values = gl.convert_layout(values.to(active.dtype.element_ty), STORED)
    row = first_row + gl.arange(0, values.shape[1], gl.SliceLayout(0, STORED))
    o_n = column + beyond + gl.arange(0, values.shape[0], gl.SliceLayout(1, STORED))
    p_active = active + row.to(gl.int64)[None, :] * size + o_n[:, None]
    gl.store(p_active, values, mask=(row < end)[None, :])
