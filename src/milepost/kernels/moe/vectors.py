"""Triton: the experts' products for so few tokens that hardly two share an expert.

Every choice reads its expert's matrices by itself: nothing has to be grouped first.

Legend: T tokens, N choices of a token, P = T * N, H hidden size, I an expert's size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs


def expand(
    hidden: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    active: Tensor,
    *,
    columns: int,
    depth: int,
    warps: int,
) -> None:
    """`active` [P, I]: SiLU(gate) * up of each choice's token in `hidden` [T, H]."""
    size = gate_up.shape[1] // 2
    _expand_kernel[(triton.cdiv(size, columns), experts.numel())](
        hidden,
        experts,
        gate_up,
        active,
        hidden.stride(0),
        CHOSEN=experts.shape[1],
        INPUTS=hidden.shape[1],
        SIZE=size,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        **OVERLAPPED,
    )


@triton.jit
def _expand_kernel(
    hidden,
    experts,
    gate_up,
    active,
    stride,
    CHOSEN: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    choice = tl.program_id(1)
    expert = tl.load(experts + choice).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x = hidden + (choice // CHOSEN).to(tl.int64) * stride + k
    w = gate_up + expert * (2 * SIZE * INPUTS) + (column % SIZE)[:, None] * INPUTS + k[None, :]
    gates = tl.zeros([COLUMNS, DEPTH], tl.float32)
    ups = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.static_range(0, INPUTS, DEPTH):
        is_input = start + k < INPUTS
        inputs = tl.load(x + start, mask=is_input, other=0.0).to(tl.float32)[None, :]
        gate_part = tl.load(w + start, mask=is_input[None, :], other=0.0)
        up_part = tl.load(w + SIZE * INPUTS + start, mask=is_input[None, :], other=0.0)
        gates += gate_part.to(tl.float32) * inputs
        ups += up_part.to(tl.float32) * inputs
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    result = (gate * tl.sigmoid(gate) * up).to(active.dtype.element_ty)
    tl.store(active + choice * SIZE + column, result, mask=column < SIZE)


def contract(
    active: Tensor,
    weights: Tensor,
    experts: Tensor,
    down: Tensor,
    parts: Tensor,
    *,
    columns: int,
    depth: int,
    warps: int,
) -> None:
    """`parts` [P, H]: `weights` [P] times the product of `active` [P, I] with `down` [X, H, I]."""
    num_outputs, size = down.shape[1:]
    _contract_kernel[(triton.cdiv(num_outputs, columns), experts.numel())](
        active,
        weights,
        experts,
        down,
        parts,
        SIZE=size,
        OUTPUTS=num_outputs,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        **OVERLAPPED,
    )


@triton.jit
def _contract_kernel(
    active,
    weights,
    experts,
    down,
    parts,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    choice = tl.program_id(1)
    expert = tl.load(experts + choice).to(tl.int64)
    weight = tl.load(weights + choice).to(tl.float32)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    w = down + expert * (OUTPUTS * SIZE) + (column % OUTPUTS)[:, None] * SIZE + k[None, :]
    totals = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.static_range(0, SIZE, DEPTH):
        is_input = start + k < SIZE
        inputs = tl.load(active + choice * SIZE + start + k, mask=is_input, other=0.0)
        weight_part = tl.load(w + start, mask=is_input[None, :], other=0.0)
        totals += weight_part.to(tl.float32) * inputs.to(tl.float32)[None, :]
    result = (tl.sum(totals, 1) * weight).to(parts.dtype.element_ty)
    tl.store(parts + choice.to(tl.int64) * OUTPUTS + column, result, mask=column < OUTPUTS)
