"""Triton: the experts' GEMMs for so many rows an expert that arithmetic is what costs.

Weights, and activations that lie row by row, come in through bulk TMA copies, which needs whole
tiles: `products.expert_table` says for which shapes. As in `grouped_gemm`, blocks of rows share an
expert.

Legend: P routed tokens, N experts of a token, H hidden size, I an expert's size, M rows of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.portable.activation import activate, is_gated
from milepost.kernels.products.portable.grouped_parts import find_rows, find_tile, load_routed

BLOCK_M = 128
_BLOCK_N = 128
_BLOCK_K = 64
_PROGRAMS = 2
"""Programs of the down projection that share an SM."""


def project_up(hidden: Tensor, up: Tensor, active: Tensor, groups: Groups) -> None:
    """`active` [P, I], by `groups.order`: the rows' `hidden` [T, H] through `up` [X, 2 * I, H] and
    SwiGLU, or through `up` [X, I, H] and the square of a ReLU."""
    size, num_inputs = active.shape[1], hidden.shape[1]
    capacity = groups.blocks.shape[1]
    # A tile holds the gate rows of its outputs, then their up rows; or twice as many up rows.
    # What lies past an expert's last row reads as zeros.
    num_parts = 1 + is_gated(up, size)
    block_n = 2 * _BLOCK_N // num_parts
    weights = up.view(-1, num_parts, size, num_inputs)
    _up_kernel[(capacity * cdiv(size, block_n),)](
        hidden,
        TensorDescriptor.from_tensor(weights, [1, num_parts, block_n, _BLOCK_K]),
        active,
        groups.order,
        groups.blocks,
        hidden.stride(0),
        capacity,
        TOP_K=active.shape[0] // hidden.shape[0],
        INPUTS=num_inputs,
        SIZE=size,
        GATED=num_parts == 2,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        num_warps=8,
        num_stages=4,
    )


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
):
    TILES: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    expert, block, tile = find_tile(blocks, TILES)
    if expert < 0:
        return
    first_row, end = find_rows(blocks, capacity, block)
    # fmt: off
    # An expert's last block is often less than half full: then half the rows are multiplied.
    if end - first_row <= BLOCK_M // 2:
        _up_tile(hidden, up, active, order, expert, first_row, end, tile, stride,
                     TOP_K, INPUTS, SIZE, GATED, BLOCK_M // 2, BLOCK_N, BLOCK_K)
    else:
        _up_tile(hidden, up, active, order, expert, first_row, end, tile, stride,
                     TOP_K, INPUTS, SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K)
    # fmt: on


@triton.jit
def _up_tile(
    hidden,
    up,
    active,
    order,
    expert,
    first_row,
    end,
    tile,
    stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < end
    # Rows beyond the expert's read token 0; they are not stored.
    token = tl.load(order + o_m, mask=is_row, other=0) // TOP_K
    o_k = tl.arange(0, BLOCK_K)
    p_x = hidden + token.to(tl.int64)[:, None] * stride + o_k[None, :]
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    both = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for i_k in range(0, INPUTS, BLOCK_K):
        weights = up.load([expert, 0, tile * BLOCK_N, i_k]).reshape(WIDTH, BLOCK_K)
        both = tl.dot(tl.load(p_x + i_k), tl.trans(weights), both)
    if GATED:
        gate, both = tl.split(tl.permute(tl.reshape(both, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
    else:
        gate = both
    b_o = activate(both, gate, GATED).to(active.dtype.element_ty)
    target = active + o_m.to(tl.int64)[:, None] * SIZE + o_n[None, :]
    tl.store(target, b_o, mask=is_row[:, None] & (o_n < SIZE)[None, :])


def project_down(
    active: Tensor, weights: Tensor, down: Tensor, partials: Tensor, groups: Groups
) -> None:
    """`partials` [P, H], by routed token: `weights` [P] times `active` [P, I] (by
    `groups.order`) through `down` [X, H, I]. `groups` must have no gaps."""
    num_outputs, size = down.shape[1:]
    programs = _PROGRAMS * num_sms(down.device)
    _down_kernel[(programs,)](
        TensorDescriptor.from_tensor(active, [BLOCK_M, _BLOCK_K]),
        weights,
        TensorDescriptor.from_tensor(down.view(-1, size), [_BLOCK_N, _BLOCK_K]),
        partials,
        groups.order,
        groups.blocks,
        groups.num_blocks,
        groups.blocks.shape[1],
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_M=BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        PROGRAMS=programs,
        num_warps=4,
        num_stages=3,
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
    num_blocks,
    capacity,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Each program takes every PROGRAMS-th tile, and loads for the next while it stores one."""
    TILES: tl.constexpr = OUTPUTS // BLOCK_N
    num_tiles = tl.load(num_blocks) * TILES
    for index in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        block, tile = index // TILES, index % TILES
        expert = tl.load(blocks + block)
        first_row, end = find_rows(blocks, capacity, block)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in range(0, SIZE, BLOCK_K):
            b_x = active.load([first_row, i_k])
            part = down.load([expert * OUTPUTS + tile * BLOCK_N, i_k])
            acc = tl.dot(b_x, tl.trans(part), acc)
        o_m = first_row + tl.arange(0, BLOCK_M)
        is_row = o_m < end
        o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        routed, weight = load_routed(order, weights, o_m, is_row)
        b_o = (acc * weight[:, None]).to(partials.dtype.element_ty)
        target = partials + routed.to(tl.int64)[:, None] * OUTPUTS + o_n[None, :]
        tl.store(target, b_o, mask=is_row[:, None])
