"""Grouped GEMMs of experts of four-bit weights and some rows on Hopper, in Gluon (see
`nibbles_gluon`).

Legend: T tokens, N experts of a token, P = T * N routed tokens, X experts, H hidden size, I an
expert's size.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.launches import quick
from milepost.kernels.moe.activation import activate
from milepost.kernels.moe.grouping import MANY_ROUTED, Groups, group_few, group_many
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Int4
from milepost.kernels.quantised.nibbles_gluon import (
    accumulate,
    begin,
    can_copy,
    products_layout,
    rows_copied,
    weights_copied,
    weights_layout,
)
from milepost.kernels.quantised.tall_gluon import find_block

_BLOCK_N = 128
"""Outputs of a program; with gates, as many of them and of ups together."""
BLOCK_M = 16
"""Rows of a block."""


def suits(hidden: Tensor, up: Int4, down: Int4) -> bool:
    """Whether rows can be copied and blocks of inputs have one scale; there are two at least: of a
    single step there is no loop, and Triton 3.6 fails at that."""
    has_one = all(each.group % BLOCK == 0 < each.num_inputs // BLOCK - 1 for each in (up, down))
    return has_one and can_copy(hidden)


def mix(
    hidden: Tensor, shares: Tensor, experts: Tensor, up: Int4, down: Int4, output: Tensor
) -> None:
    """`output` [T, N, H], a partial for each routed token: `shares` [T, N] times what `experts`
    [T, N] make of `hidden` [T, H]."""
    num_routed, size = experts.numel(), down.num_inputs
    group = group_many if num_routed > MANY_ROUTED else group_few
    groups = group(experts, len(up.scales), BLOCK_M)
    active = hidden.new_empty(num_routed, size)
    project_up(hidden, up, active, groups, is_gated=up.num_outputs == 2 * size)
    project_down(active, shares, down, output, groups)


def project_up(
    hidden: Tensor, weight: Int4, active: Tensor, groups: Groups, *, is_gated: bool
) -> None:
    """`active` [P, I], by `groups.order`: what `weight` and the activation make of the rows' tokens
    `hidden` [T, H]."""
    size, capacity = active.shape[1], groups.blocks.shape[1]
    width = _BLOCK_N // (1 + is_gated)
    _up_kernel[(capacity * triton.cdiv(size, width),)](
        hidden,
        weight.packed,
        weight.scales,
        weight.zeros,
        active,
        groups.order,
        groups.blocks,
        hidden.stride(0),
        capacity,
        TOP_K=len(active) // len(hidden),
        SIZE=size,
        GATED=is_gated,
        **_steps(weight),
        **OVERLAPPED,
    )


def project_down(
    active: Tensor, shares: Tensor, weight: Int4, partials: Tensor, groups: Groups
) -> None:
    """`partials` [P, H], by routed token: `shares` [P] times the product of `active` [P, I] (by
    `groups.order`) with `weight` [X, H, I]."""
    num_outputs, capacity = partials.shape[-1], groups.blocks.shape[1]
    _down_kernel[(capacity * triton.cdiv(num_outputs, _BLOCK_N),)](
        active,
        weight.packed,
        weight.scales,
        weight.zeros,
        shares,
        partials,
        groups.order,
        groups.blocks,
        capacity,
        OUTPUTS=num_outputs,
        **_steps(weight),
        **OVERLAPPED,
    )


def _steps(weight: Int4) -> dict[str, Any]:
    num_blocks = weight.num_inputs // BLOCK
    blocks = 2 if num_blocks % 2 == 0 and num_blocks > 2 else 1
    return {
        "INPUTS": weight.num_inputs,
        "GROUP": weight.group,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": _BLOCK_N,
        "BLOCKS": blocks,
        "STEPS": num_blocks // blocks,
        "STAGES": 4 if blocks == 2 else 6,
        "num_warps": 4,
    }


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
    stride,
    capacity,
    TOP_K: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    WARPS: gl.constexpr = gl.num_warps()
    COPIED: gl.constexpr = rows_copied(BLOCKS, WARPS)
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TILES: gl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    HEIGHT: gl.constexpr = 2 * SIZE if GATED else SIZE
    first_n = gl.program_id(0) % TILES * WIDTH
    expert, first_row, end = find_block(blocks, capacity, gl.program_id(0) // TILES)
    if expert < 0:
        return
    # Rows beyond the expert's repeat its first, outputs beyond the last wrap: neither is stored.
    o_m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIED))
    token = gl.load(order + gl.where(o_m < end, o_m, first_row)) // TOP_K
    p_x = hidden + token.to(gl.int64) * stride
    # Gates, and behind them all ups.
    result = _multiply(
        p_x, weight, scales, zeros, expert.to(gl.int64), first_n,
        HEIGHT, SIZE, WIDTH, INPUTS, GROUP, BLOCK_N, BLOCKS, STEPS, STAGES,
    )  # fmt: skip
    if GATED:
        both = gl.permute(gl.reshape(result, [2, WIDTH, BLOCK_M]), (1, 2, 0))
        gates, ups = gl.split(both)
    else:
        gates, ups = result, result
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    b_o = gl.convert_layout(activate(ups, gates, GATED), STORED)
    o_m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORED))[None, :]
    o_n = first_n + gl.arange(0, WIDTH, gl.SliceLayout(1, STORED))[:, None]
    target = active + o_m.to(gl.int64) * SIZE + o_n
    gl.store(target, b_o.to(active.dtype.element_ty), mask=(o_m < end) & (o_n < SIZE))


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
    capacity,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    WARPS: gl.constexpr = gl.num_warps()
    COPIED: gl.constexpr = rows_copied(BLOCKS, WARPS)
    TILES: gl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    first_n = gl.program_id(0) % TILES * BLOCK_N
    expert, first_row, end = find_block(blocks, capacity, gl.program_id(0) // TILES)
    if expert < 0:
        return
    o_m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIED))
    p_x = active + gl.where(o_m < end, o_m, first_row).to(gl.int64) * INPUTS
    result = _multiply(
        p_x, weight, scales, zeros, expert.to(gl.int64), first_n,
        OUTPUTS, OUTPUTS, BLOCK_N, INPUTS, GROUP, BLOCK_N, BLOCKS, STEPS, STAGES,
    )  # fmt: skip
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    o_m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORED))
    is_row = o_m < end
    routed = gl.load(order + gl.where(is_row, o_m, first_row)).to(gl.int64)
    share = gl.load(shares + routed).to(gl.float32)
    b_o = gl.convert_layout(result, STORED) * share[None, :]
    o_n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORED))[:, None]
    target = partials + routed[None, :] * OUTPUTS + o_n
    gl.store(target, b_o.to(partials.dtype.element_ty), mask=is_row[None, :] & (o_n < OUTPUTS))


@gluon.jit
def _multiply(
    p_x,
    weight,
    scales,
    zeros,
    expert,
    first_n,
    HEIGHT: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products [N, M] of an expert's weights [HEIGHT, INPUTS]: WIDTH rows of each SIZE of them from
    `first_n` on."""
    WARPS: gl.constexpr = gl.num_warps()
    copied = _rows(first_n, weights_copied(BLOCKS, WARPS), SIZE, WIDTH, BLOCK_N)
    p_w = weight + (expert * HEIGHT + copied) * (INPUTS // 2)
    held = begin(p_w, 0, BLOCKS, STEPS, STAGES)
    scaled = _rows(first_n, products_layout(WARPS), SIZE, WIDTH, BLOCK_N)
    p_scale = scales + (expert * HEIGHT + scaled) * (INPUTS // GROUP)
    shifted = _rows(first_n, weights_layout(WARPS), SIZE, WIDTH, BLOCK_N)
    p_zero = zeros + (expert * HEIGHT + shifted) * (INPUTS // GROUP)
    return accumulate(held, p_x, p_w, p_scale, p_zero, 0, BLOCKS, STEPS, GROUP)


@gluon.jit
def _rows(
    first_n, LAYOUT: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr
):
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    return o_n // WIDTH * SIZE + (first_n + o_n % WIDTH) % SIZE
