"""Triton: GEMMs of FP8 weights, dense ones and those of routed experts.

The weights are the left operand: with few rows they fill the tensor cores' tall side. Every BLOCK
inputs the sum goes to float32 registers, times both scales; tensor cores keep some 14 bits of a
float8 sum. Few rows are rounded on the way; more, which many programs read, in a launch of their
own. Chips without arithmetic in float8 multiply the same numbers in float16.

Legend: T tokens, I inputs, O outputs, S splits along I, X experts, N experts of a token, P = T * N
routed tokens, R rows of a GEMM (T, or P).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import Chip
from milepost.kernels.moe.grouping import Groups
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, FP8, Fp8
from milepost.kernels.tiles import Tiles
from milepost.kernels.triton_float8 import LARGEST, decode, encode, has_fp8

_LEAST_SCALE = tl.constexpr(1e-12)


def quantise(rows: Tensor, weight: Fp8, chip: Chip) -> tuple[Tensor, Tensor]:
    """`rows` [R, I] as `forms.quantise_rows` rounds them for a weight."""
    num_rows, num_inputs = rows.shape
    count = triton.cdiv(num_inputs, weight.depth)
    values = rows.new_empty(num_rows, num_inputs, dtype=FP8)
    scales = rows.new_empty(num_rows, count, dtype=torch.float32)
    _quantise_kernel[(num_rows, count)](
        rows,
        values.view(torch.uint8),
        scales,
        weight.input_scale,
        rows.stride(0),
        INPUTS=num_inputs,
        DEPTH=weight.depth,
        BLOCK=triton.next_power_of_2(weight.depth),
        NATIVE=has_fp8(chip),
        num_warps=1 if weight.depth <= BLOCK else 4,
        **OVERLAPPED,
    )
    return values, scales


@triton.jit
def _quantise_kernel(
    rows,
    values,
    scales,
    input_scale,
    stride,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_k = tl.arange(0, BLOCK)
    is_input = (o_k < DEPTH) & (i_part * DEPTH + o_k < INPUTS)
    p_x = rows + i_row * stride + i_part * DEPTH + o_k
    b_x = tl.load(p_x, mask=is_input, other=0.0).to(tl.float32)
    if input_scale is None:
        scale = tl.maximum(tl.max(tl.abs(b_x), 0) / LARGEST, _LEAST_SCALE)
    else:
        scale = tl.load(input_scale)
    b_q = encode(b_x / scale, NATIVE)
    tl.store(values + i_row * INPUTS + i_part * DEPTH + o_k, b_q, mask=is_input)
    tl.store(scales + i_row * tl.num_programs(1) + i_part, scale)


def gemm(
    rows: Tensor,
    row_scales: Tensor | None,
    weight: Fp8,
    bias: Tensor | None,
    output: Tensor,
    tiles: Tiles,
    chip: Chip,
    *,
    split_k: int = 1,
    overlaps: bool = True,
) -> None:
    """`output` [R, O], or [S, R, O] float32 partials: `rows` [R, I] times `weight` [O, I].

    `rows` are rounded, with `row_scales` [R, I / depth]; or not yet, where those are None.
    """
    num_rows, num_inputs = rows.shape
    num_outputs = weight.values.shape[0]
    grid = (
        triton.cdiv(num_outputs, tiles.block_n),
        split_k,
        triton.cdiv(num_rows, tiles.block_m),
    )
    _gemm_kernel[grid](
        _bytes(rows),
        row_scales,
        weight.values.view(torch.uint8),
        weight.scales,
        bias,
        output,
        num_rows,
        rows.stride(0),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLIT_K=split_k,
        **_facts(weight, chip),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **(OVERLAPPED if overlaps else {}),
    )


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows


def _facts(weight: Fp8, chip: Chip) -> dict[str, int]:
    return {
        "BLOCK_K": BLOCK,
        "SCALE_ROWS": weight.rows,
        "BLOCK_SCALES": weight.depth == BLOCK,
        "NATIVE": has_fp8(chip),
    }


@triton.jit
def _add_step(
    acc,
    p_x,
    p_row_scale,
    p_w,
    p_scale,
    i_k,
    BLOCK_K: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """acc [N, M] and the product of the inputs i_k to i_k + BLOCK_K, of weights at `p_w` [N, K] and
    rows at `p_x` [M, K]."""
    b_w = decode(tl.load(p_w + i_k), NATIVE)
    b_x = tl.load(p_x + i_k)
    if IS_ROUNDED:
        b_x = decode(b_x, NATIVE)
    else:
        b_x = b_x.to(tl.float32)
        row_scale = tl.maximum(tl.max(tl.abs(b_x), 1) / LARGEST, _LEAST_SCALE)
        b_x = decode(encode(b_x / row_scale[:, None], NATIVE), NATIVE)
    b_dot = tl.dot(b_w, tl.trans(b_x))
    if BLOCK_SCALES:
        if IS_ROUNDED:
            row_scale = tl.load(p_row_scale + i_k // BLOCK_K)
        scale = tl.load(p_scale + i_k // BLOCK_K)
        b_dot *= scale[:, None] * row_scale[None, :]
    return acc + b_dot


@triton.jit(do_not_specialize=("num_rows",))
def _gemm_kernel(
    rows,
    row_scales,
    weight,
    scales,
    bias,
    output,
    num_rows,
    stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    SHARE: tl.constexpr = (INPUTS + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    DEPTHS: tl.constexpr = INPUTS // BLOCK_K if BLOCK_SCALES else 1
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = o_m < num_rows
    first = split * SHARE
    o_k = first + tl.arange(0, BLOCK_K)
    # Rows beyond the last read row 0 and outputs beyond the last wrap: neither is stored.
    row, column = tl.where(is_row, o_m, 0).to(tl.int64), o_n % OUTPUTS
    p_x = rows + row[:, None] * stride + o_k[None, :]
    p_w = weight + column.to(tl.int64)[:, None] * INPUTS + o_k[None, :]
    p_scale = scales + column // SCALE_ROWS * DEPTHS + first // BLOCK_K
    p_row_scale = row_scales
    if row_scales is not None:
        p_row_scale = row_scales + row * DEPTHS + first // BLOCK_K
    wait_for_inputs()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(0, tl.minimum(SHARE, INPUTS - first), BLOCK_K):
        acc = _add_step(
            acc, p_x, p_row_scale, p_w, p_scale, i_k,
            BLOCK_K, BLOCK_SCALES, NATIVE, row_scales is not None,
        )  # fmt: skip
    if not BLOCK_SCALES:
        row_scale = tl.load(row_scales + row)
        acc *= tl.load(scales + column // SCALE_ROWS)[:, None] * row_scale[None, :]
    if not NATIVE:
        acc *= 65536.0
    if bias is not None:
        b_bias = tl.load(bias + column, mask=(o_n < OUTPUTS) & (split == 0), other=0.0)
        acc += b_bias.to(tl.float32)[:, None]
    target = (split.to(tl.int64) * num_rows + o_m) * OUTPUTS
    mask = is_row[:, None] & (o_n < OUTPUTS)[None, :]
    b_o = tl.trans(acc).to(output.dtype.element_ty)
    tl.store(output + target[:, None] + o_n[None, :], b_o, mask=mask)


def project_up(
    rows: Tensor,
    row_scales: Tensor | None,
    weight: Fp8,
    active: Tensor,
    groups: Groups,
    tiles: Tiles,
    chip: Chip,
) -> None:
    """`active` [P, I], by `groups.order`: SiLU(gate) * up of the rows' tokens `rows` [T, H]."""
    capacity, size = groups.blocks.shape[1], active.shape[1]
    _up_kernel[(capacity * triton.cdiv(size, tiles.block_n),)](
        _bytes(rows),
        row_scales,
        weight.values.view(torch.uint8),
        weight.scales,
        active,
        groups.order,
        groups.blocks,
        rows.stride(0),
        capacity,
        TOP_K=len(active) // len(rows),
        INPUTS=rows.shape[1],
        SIZE=size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        **_facts(weight, chip),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=("capacity",))
def _up_kernel(
    rows,
    row_scales,
    weight,
    scales,
    active,
    order,
    blocks,
    stride,
    capacity,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    DEPTHS: tl.constexpr = INPUTS // BLOCK_K if BLOCK_SCALES else 1
    OWN_SCALES: tl.constexpr = (2 * SIZE + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(blocks + block).to(tl.int64)
    if expert < 0:
        return
    o_m = tl.load(blocks + capacity + block) + tl.arange(0, BLOCK_M)
    is_row = o_m < tl.load(blocks + 2 * capacity + block)
    # Rows beyond the expert's read token 0 and outputs beyond the last wrap: neither is stored.
    token = (tl.load(order + o_m, mask=is_row, other=0) // TOP_K).to(tl.int64)
    o_n, o_k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gate_row = o_n % SIZE
    p_x = rows + token[:, None] * stride + o_k[None, :]
    p_w = weight + expert * (2 * SIZE * INPUTS) + gate_row[:, None] * INPUTS + o_k[None, :]
    own = scales + expert * OWN_SCALES
    p_gate = own + gate_row // SCALE_ROWS * DEPTHS
    p_up = own + (SIZE + gate_row) // SCALE_ROWS * DEPTHS
    p_row_scale = row_scales
    if row_scales is not None:
        p_row_scale = row_scales + token * DEPTHS
    b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_up = b_gate
    for i_k in range(0, INPUTS, BLOCK_K):
        b_gate = _add_step(
            b_gate, p_x, p_row_scale, p_w, p_gate, i_k,
            BLOCK_K, BLOCK_SCALES, NATIVE, row_scales is not None,
        )  # fmt: skip
        b_up = _add_step(
            b_up, p_x, p_row_scale, p_w + SIZE * INPUTS, p_up, i_k,
            BLOCK_K, BLOCK_SCALES, NATIVE, row_scales is not None,
        )  # fmt: skip
    if not BLOCK_SCALES:
        row_scale = tl.load(row_scales + token)
        b_gate *= tl.load(p_gate)[:, None] * row_scale[None, :]
        b_up *= tl.load(p_up)[:, None] * row_scale[None, :]
    if not NATIVE:
        b_gate *= 65536.0
        b_up *= 65536.0
    b_o = tl.trans(b_gate * tl.sigmoid(b_gate) * b_up).to(active.dtype.element_ty)
    mask = is_row[:, None] & (o_n < SIZE)[None, :]
    tl.store(active + o_m.to(tl.int64)[:, None] * SIZE + o_n[None, :], b_o, mask=mask)


def project_down(
    active: Tensor,
    row_scales: Tensor | None,
    shares: Tensor,
    weight: Fp8,
    partials: Tensor,
    groups: Groups,
    tiles: Tiles,
    chip: Chip,
) -> None:
    """`partials` [P, H], by routed token: `shares` [P] times the product of `active` [P, I] (by
    `groups.order`) with `weight` [X, H, I]."""
    num_outputs, size = weight.values.shape[1:]
    capacity = groups.blocks.shape[1]
    _down_kernel[(capacity * triton.cdiv(num_outputs, tiles.block_n),)](
        _bytes(active),
        row_scales,
        weight.values.view(torch.uint8),
        weight.scales,
        shares,
        partials,
        groups.order,
        groups.blocks,
        capacity,
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        **_facts(weight, chip),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=("capacity",))
def _down_kernel(
    active,
    row_scales,
    weight,
    scales,
    shares,
    partials,
    order,
    blocks,
    capacity,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    DEPTHS: tl.constexpr = SIZE // BLOCK_K if BLOCK_SCALES else 1
    OWN_SCALES: tl.constexpr = (OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(blocks + block).to(tl.int64)
    if expert < 0:
        return
    first_row = tl.load(blocks + capacity + block)
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < tl.load(blocks + 2 * capacity + block)
    # Rows beyond the expert's repeat its first and outputs beyond the last wrap: none is stored.
    row = tl.where(is_row, o_m, first_row).to(tl.int64)
    o_n, o_k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    column = o_n % OUTPUTS
    p_x = active + row[:, None] * SIZE + o_k[None, :]
    p_w = weight + expert * (OUTPUTS * SIZE) + column[:, None] * SIZE + o_k[None, :]
    p_scale = scales + expert * OWN_SCALES + column // SCALE_ROWS * DEPTHS
    p_row_scale = row_scales
    if row_scales is not None:
        p_row_scale = row_scales + row * DEPTHS
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(0, SIZE, BLOCK_K):
        acc = _add_step(
            acc, p_x, p_row_scale, p_w, p_scale, i_k,
            BLOCK_K, BLOCK_SCALES, NATIVE, row_scales is not None,
        )  # fmt: skip
    if not BLOCK_SCALES:
        acc *= tl.load(p_scale)[:, None] * tl.load(row_scales + row)[None, :]
    if not NATIVE:
        acc *= 65536.0
    routed = tl.load(order + o_m, mask=is_row, other=0).to(tl.int64)
    share = tl.load(shares + routed, mask=is_row, other=0.0).to(tl.float32)
    b_o = (tl.trans(acc) * share[:, None]).to(partials.dtype.element_ty)
    mask = is_row[:, None] & (o_n < OUTPUTS)[None, :]
    tl.store(partials + routed[:, None] * OUTPUTS + o_n[None, :], b_o, mask=mask)
