"""The experts' up projection of FP8 weights and many rows on Hopper, in Gluon: `triton_tall` with
warps that divide the work.

Four warps gather the rows where they lie and have TMA bring the weights. What is made is laid out
by blocks, with room for all of a block's rows, so that the down projection finds boxes.

Legend: B rows of all blocks, P routed tokens, T tokens, H hidden size, I an expert's size, D scales
of a row.
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
from milepost.kernels.platform.tensors import FP8_MAX, LEAST_SCALE
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.grouping import Groups, group_many
from milepost.kernels.products.hopper.fp8_grouped_down import project_down
from milepost.kernels.products.hopper.fp8_grouped_parts import (
    BLOCK_M,
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
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_rows
from milepost.kernels.products.run_experts import RoutedRows

_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_LARGEST = gl.constexpr(FP8_MAX)
_LEAST_SCALE = gl.constexpr(LEAST_SCALE)


def run(routed: RoutedRows) -> Tensor:
    """Partials [T, N, H]."""
    up, down, chip = routed.up, routed.down, routed.chip
    assert isinstance(up, Fp8), "the kernel's form"
    assert isinstance(down, Fp8), "experts have one form"
    groups = group_many(routed.experts, routed.num_experts, BLOCK_M)
    active, active_scales = new_rounded(routed, groups.blocks.shape[1] * BLOCK_M)
    output = routed.new_output(routed.experts.shape[1])
    values, scales = round_rows(routed.rows, up, chip, are_few=False)
    assert scales is not None, "rows are rounded in blocks"
    how = {"is_gated": routed.is_gated, "is_bfloat": routed.rows.dtype == torch.bfloat16}
    project_up(values, scales, up, active, active_scales, groups, chip, **how)
    project_down(active, active_scales, routed.routing_weights, down, output, groups, chip)
    return output


def project_up(
    rows: Tensor,
    row_scales: Tensor,
    up: Fp8,
    active: Tensor,
    active_scales: Tensor,
    groups: Groups,
    chip: Chip,
    *,
    is_gated: bool,
    is_bfloat: bool,
) -> None:
    """`active` [B, I] and `active_scales` [D, B], block by block: what `up` and the activation make
    of the rows' tokens `rows` [T, H], rounded with `row_scales` [D, T]."""
    size, num_inputs = active.shape[1], rows.shape[1]
    _up_kernel[(chip.num_sms,)](
        rows,
        row_scales,
        TensorDescriptor.from_tensor(up.values.view(-1, num_inputs), [BLOCK, BLOCK], LAYOUT),
        up.scales,
        active,
        active_scales,
        groups.order,
        groups.blocks,
        groups.num_blocks,
        rows.stride(0),
        row_scales.stride(0),
        active_scales.stride(0),
        groups.blocks.shape[1],
        TOP_K=groups.order.numel() // len(rows),
        INPUTS=num_inputs,
        SIZE=size,
        PARTS=2 if is_gated else 1,
        HALF=HALF,
        BLOCK=BLOCK,
        STAGES=STAGES,
        IS_BFLOAT=is_bfloat,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["scale_stride", "active_stride", "capacity"])
def _up_kernel(
    rows,
    row_scales,
    weight,
    scales,
    active,
    active_scales,
    order,
    blocks,
    num_blocks,
    stride,
    scale_stride,
    active_stride,
    capacity,
    TOP_K: gl.constexpr,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    PARTS: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    IS_BFLOAT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Each program takes every so many tiles of BLOCK outputs, with the gates beside them."""
    TILES: gl.constexpr = SIZE // BLOCK
    STEPS: gl.constexpr = INPUTS // BLOCK
    stages = open_stages(weight, HALF, BLOCK, STAGES, PARTS, 2)
    wait_for_inputs()
    launch_dependents()
    num_tiles = gl.load(num_blocks) * TILES
    shared = (order, blocks, capacity, num_tiles, stages)
    consumed = (row_scales, scale_stride, scales, active, active_scales, active_stride)
    produced = (rows, stride, weight)
    gl.warp_specialize(
        [
            (_consume, (shared, consumed, 0, TOP_K, SIZE, TILES, STEPS, STAGES, PARTS, IS_BFLOAT)),
            (_consume, (shared, consumed, 1, TOP_K, SIZE, TILES, STEPS, STAGES, PARTS, IS_BFLOAT)),
            (_produce, (shared, produced, TOP_K, SIZE, TILES, STEPS, STAGES, PARTS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    shared,
    produced,
    TOP_K: gl.constexpr,
    SIZE: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Load every step of every tile as soon as there is room. Copies of rows are waited for a step
    later: TMA's signal for weights can't wait for them."""
    order, blocks, capacity, num_tiles, stages = shared
    inputs, weights, bars, _ = stages
    rows, stride, weight = produced
    HALF: gl.constexpr = inputs.type.shape[1]
    BLOCK: gl.constexpr = inputs.type.shape[2]
    COPIED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, HALF, layout=gl.SliceLayout(1, COPIED))
    o_k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, COPIED))
    number = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, first_row, end = find_block(blocks, capacity, index // TILES)
        row = expert * (PARTS * SIZE) + index % TILES * BLOCK
        # An expert's last block is often less than half full: then it has no second half.
        is_tall = end - first_row > HALF
        first = gl.load(order + gl.minimum(first_row + o_m, end - 1)) // TOP_K
        second = gl.load(order + gl.minimum(first_row + HALF + o_m, end - 1)) // TOP_K
        p_first = rows + (first * stride)[:, None] + o_k[None, :]
        p_second = rows + (second * stride)[:, None] + o_k[None, :]
        for step in range(STEPS):
            stage = wait_for_room(number, bars, STAGES)
            bar, at = bars.index(stage), step * BLOCK
            mbarrier.expect(bar, PARTS * BLOCK * BLOCK)
            for part in gl.static_range(PARTS):
                place = weights.index(stage * PARTS + part)
                load_box(weight, [row + part * SIZE, at], bar, place)
            async_copy.async_copy_global_to_shared(inputs.index(2 * stage), p_first + at)
            if is_tall:
                async_copy.async_copy_global_to_shared(inputs.index(2 * stage + 1), p_second + at)
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
def _consume(
    shared,
    consumed,
    HALF_TILE: gl.constexpr,
    TOP_K: gl.constexpr,
    SIZE: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    IS_BFLOAT: gl.constexpr,
):
    order, blocks, capacity, num_tiles, stages = shared
    row_scales, scale_stride, scales, active, active_scales, active_stride = consumed
    inputs, _, bars, _ = stages
    HALF: gl.constexpr = inputs.type.shape[1]
    BLOCK: gl.constexpr = inputs.type.shape[2]
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    o_m = HALF_TILE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, RESULT))
    number, turn = 0, 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        block, tile = index // TILES, index % TILES
        expert, first_row, end = find_block(blocks, capacity, block)
        is_tall = end - first_row > HALF
        if first_row + HALF_TILE * HALF < end:
            token = gl.load(order + gl.minimum(first_row + o_m, end - 1)) // TOP_K
            p_gate = scales + (expert * (PARTS * TILES) + tile).to(gl.int64) * STEPS
            gate, up = multiply(
                p_gate, p_gate + (PARTS - 1) * TILES * STEPS, row_scales + token, scale_stride,
                number, turn, is_tall, stages, HALF_TILE, STEPS, STAGES, PARTS, RESULT,
            )  # fmt: skip
            values, scale = _round(gate, up, PARTS, IS_BFLOAT)
            row = block * (2 * HALF) + o_m
            gl.store(active_scales + tile * active_stride + row, scale)
            _store(active, values, block * (2 * HALF) + HALF_TILE * HALF, tile * BLOCK, SIZE)
        else:
            skip(number, bars, STEPS, STAGES)
        number += STEPS
        turn += gl.where(is_tall, STEPS * PARTS, 0)


@gluon.jit
def _round(gate, up, PARTS: gl.constexpr, IS_BFLOAT: gl.constexpr):
    """What the activation makes of both, rounded, and its rows' scales."""
    if PARTS == 2:
        values = gate / (1 + gl.exp(-gate)) * up
    else:
        values = gl.maximum(gate, 0.0)
        values *= values
    # Between the projections activations have 16 bits, whatever computes them.
    values = values.to(gl.bfloat16 if IS_BFLOAT else gl.float16).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(values), 1) / _LARGEST, _LEAST_SCALE)
    values = gl.minimum(gl.maximum(values / scale[:, None], -_LARGEST), _LARGEST)
    return values.to(gl.float8e4nv), scale


@gluon.jit
def _store(active, values, first_row, first_column, SIZE: gl.constexpr):
    STORED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, STORED)
    row = first_row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, STORED))
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))
    gl.store(active + row.to(gl.int64)[:, None] * SIZE + column[None, :], values)
