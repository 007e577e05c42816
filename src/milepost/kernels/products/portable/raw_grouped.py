"""Triton: the experts' grouped GEMMs, over blocks of rows that share an expert.

Legend: P routed tokens, N experts of a token, H hidden size, I an expert's size, M rows of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import Tiles, cdiv
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.portable.activation import activate, is_gated
from milepost.kernels.products.portable.grouped_parts import find_tile, load_routed, spread_rows


def project_up(hidden: Tensor, up: Tensor, active: Tensor, groups: Groups, tiles: Tiles) -> None:
    """`active` [P, I], by `groups.order`: the rows' `hidden` [T, H] through `up` [X, 2 * I, H] and
    SwiGLU, or through `up` [X, I, H] and the square of a ReLU."""
    size = active.shape[1]
    capacity = groups.blocks.shape[1]
    _up_kernel[(capacity * cdiv(size, tiles.block_n),)](
        hidden,
        up,
        active,
        groups.order,
        groups.blocks,
        hidden.stride(0),
        capacity,
        TOP_K=active.shape[0] // hidden.shape[0],
        INPUTS=hidden.shape[1],
        SIZE=size,
        GATED=is_gated(up, size),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SWAPPED=tiles.is_swapped,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@triton.jit
def _multiply(left, right, acc, SWAPPED: tl.constexpr):
    """acc + left @ right.T, transposed if SWAPPED."""
    if SWAPPED:
        return tl.dot(right, tl.trans(left), acc, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), acc, input_precision="ieee")


@triton.jit
def _store(output, o_row, o_n, is_row, b_o, WIDTH: tl.constexpr, SWAPPED: tl.constexpr):
    """A tile of rows that begin at `o_row` of `output`, transposed if SWAPPED."""
    if SWAPPED:
        mask = (o_n < WIDTH)[:, None] & is_row[None, :]
        tl.store(output + o_row[None, :] + o_n[:, None], b_o, mask=mask)
    else:
        mask = is_row[:, None] & (o_n < WIDTH)[None, :]
        tl.store(output + o_row[:, None] + o_n[None, :], b_o, mask=mask)


@triton.jit
def _load(pointers, i_k, o_k, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [rows, BLOCK_K] from input i_k on."""
    if INPUTS % BLOCK_K == 0:
        return tl.load(pointers + i_k)
    else:
        return tl.load(pointers + i_k, mask=(i_k + o_k < INPUTS)[None, :], other=0.0)


@quick
@triton.jit(do_not_specialize=("capacity",))
def _up_kernel(
    hidden,
    up,
    active,
    order,
    blocks,
    stride,
    capacity,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    TILES: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    expert, block, tile = find_tile(blocks, TILES)
    if expert < 0:
        return
    _first_row, o_m, is_row = spread_rows(blocks, capacity, block, BLOCK_M)
    # Rows beyond the expert's read token 0 and outputs beyond the last wrap: neither is stored.
    token = tl.load(order + o_m, mask=is_row, other=0) // TOP_K
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_x = hidden + token.to(tl.int64)[:, None] * stride + o_k[None, :]
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    # Up rows stand behind the gates'.
    p_gate = up + expert.to(tl.int64) * (ROWS * INPUTS) + (o_n % SIZE)[:, None] * INPUTS
    p_gate += o_k[None, :]
    p_up = p_gate + (ROWS - SIZE) * INPUTS
    if SWAPPED:
        b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_up = b_gate
    for i_k in range(0, INPUTS, BLOCK_K):
        b_x = _load(p_x, i_k, o_k, INPUTS, BLOCK_K)
        if GATED:
            b_gate = _multiply(b_x, _load(p_gate, i_k, o_k, INPUTS, BLOCK_K), b_gate, SWAPPED)
        b_up = _multiply(b_x, _load(p_up, i_k, o_k, INPUTS, BLOCK_K), b_up, SWAPPED)
    b_o = activate(b_up, b_gate, GATED).to(active.dtype.element_ty)
    _store(active, o_m.to(tl.int64) * SIZE, o_n, is_row, b_o, SIZE, SWAPPED)


def project_down(
    active: Tensor,
    weights: Tensor,
    down: Tensor,
    partials: Tensor,
    groups: Groups,
    tiles: Tiles,
) -> None:
    """`partials` [P, H], by routed token: `weights` [P] times `active` [P, I] (by
    `groups.order`) through `down` [X, H, I]."""
    num_outputs, size = down.shape[1:]
    capacity = groups.blocks.shape[1]
    _down_kernel[(capacity * cdiv(num_outputs, tiles.block_n),)](
        active,
        weights,
        down,
        partials,
        groups.order,
        groups.blocks,
        capacity,
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SWAPPED=tiles.is_swapped,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=("capacity",))
def _down_kernel(
    active,
    weights,
    down,
    partials,
    order,
    blocks,
    capacity,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    expert, block, tile = find_tile(blocks, TILES)
    if expert < 0:
        return
    first_row, o_m, is_row = spread_rows(blocks, capacity, block, BLOCK_M)
    routed, weight = load_routed(order, weights, o_m, is_row)
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    # Rows beyond the expert's repeat its first and outputs beyond the last wrap: neither is stored.
    p_x = active + tl.where(is_row, o_m, first_row).to(tl.int64)[:, None] * SIZE + o_k[None, :]
    first = down + expert.to(tl.int64) * (OUTPUTS * SIZE)
    p_w = first + (o_n % OUTPUTS)[:, None] * SIZE + o_k[None, :]
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(0, SIZE, BLOCK_K):
        b_x = _load(p_x, i_k, o_k, SIZE, BLOCK_K)
        acc = _multiply(b_x, _load(p_w, i_k, o_k, SIZE, BLOCK_K), acc, SWAPPED)
    weight = weight[None, :] if SWAPPED else weight[:, None]
    b_o = (acc * weight).to(partials.dtype.element_ty)
    _store(partials, routed.to(tl.int64) * OUTPUTS, o_n, is_row, b_o, OUTPUTS, SWAPPED)
