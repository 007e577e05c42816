"""Triton: the experts' matrix products over blocks of rows that share an expert.

Legend: P choices, N choices of a token, H hidden size, I an expert's size, M rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import Chip
from milepost.kernels.moe.grouping import Groups
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How one product is cut up."""

    columns: int
    """Outputs of a program; for the first product both of the gate and of the up part."""
    depth: int
    """Inputs of one step."""
    warps: int
    stages: int
    is_swapped: bool = False
    """The weights are the left operand: with few rows they fill the tensor cores' tall side."""

    def fitted(self, rows: int, weights: int, chip: Chip) -> Tiles:
        """The same with as many stages as the chip has room for in 16-bit types; a step holds
        `rows` inputs and the tile of so many `weights`."""
        step = (rows + weights * self.columns) * self.depth * 2
        return replace(self, stages=chip.choose_stages(self.stages, step))


def expand(
    hidden: Tensor, gate_up: Tensor, active: Tensor, groups: Groups, rows: int, tiles: Tiles
) -> None:
    """`active` [P, I], by `groups.order`: SiLU(gate) * up of the rows' `hidden` [T, H]."""
    size = gate_up.shape[1] // 2
    capacity = groups.blocks.shape[1]
    _expand_kernel[(capacity * triton.cdiv(size, tiles.columns),)](
        hidden,
        gate_up,
        active,
        groups.order,
        groups.blocks,
        hidden.stride(0),
        capacity,
        CHOSEN=active.shape[0] // hidden.shape[0],
        INPUTS=hidden.shape[1],
        SIZE=size,
        ROWS=rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        SWAPPED=tiles.is_swapped,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **OVERLAPPED,
    )


@triton.jit
def _multiply(left, right, total, SWAPPED: tl.constexpr):
    """total + left @ right.T, transposed if SWAPPED."""
    if SWAPPED:
        return tl.dot(right, tl.trans(left), total, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), total, input_precision="ieee")


@triton.jit(do_not_specialize=("capacity",))
def _expand_kernel(
    hidden,
    gate_up,
    active,
    order,
    blocks,
    stride,
    capacity,
    CHOSEN: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    row = tl.load(blocks + capacity + block) + tl.arange(0, ROWS)
    is_row = row < tl.load(blocks + 2 * capacity + block)
    # Rows beyond the expert's read token 0 and columns beyond the last wrap: neither is stored.
    token = tl.load(order + row, mask=is_row, other=0) // CHOSEN
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x = hidden + token.to(tl.int64)[:, None] * stride + k[None, :]
    first = gate_up + expert.to(tl.int64) * (2 * SIZE * INPUTS)
    w = first + (column % SIZE)[:, None] * INPUTS + k[None, :]
    if SWAPPED:
        gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = gate
    for start in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            inputs = tl.load(x + start)
            gate_part = tl.load(w + start)
            up_part = tl.load(w + SIZE * INPUTS + start)
        else:
            is_input = (start + k < INPUTS)[None, :]
            inputs = tl.load(x + start, mask=is_input, other=0.0)
            gate_part = tl.load(w + start, mask=is_input, other=0.0)
            up_part = tl.load(w + SIZE * INPUTS + start, mask=is_input, other=0.0)
        gate = _multiply(inputs, gate_part, gate, SWAPPED)
        up = _multiply(inputs, up_part, up, SWAPPED)
    result = (gate * tl.sigmoid(gate) * up).to(active.dtype.element_ty)
    target = row.to(tl.int64) * SIZE
    if SWAPPED:
        mask = (column < SIZE)[:, None] & is_row[None, :]
        tl.store(active + target[None, :] + column[:, None], result, mask=mask)
    else:
        mask = is_row[:, None] & (column < SIZE)[None, :]
        tl.store(active + target[:, None] + column[None, :], result, mask=mask)


def contract(
    active: Tensor,
    weights: Tensor,
    down: Tensor,
    parts: Tensor,
    groups: Groups,
    rows: int,
    tiles: Tiles,
) -> None:
    """`parts` [P, H], by choice: `weights` [P] times the product of `active` [P, I] (by
    `groups.order`) with `down` [X, H, I]."""
    num_outputs, size = down.shape[1:]
    capacity = groups.blocks.shape[1]
    _contract_kernel[(capacity * triton.cdiv(num_outputs, tiles.columns),)](
        active,
        weights,
        down,
        parts,
        groups.order,
        groups.blocks,
        capacity,
        SIZE=size,
        OUTPUTS=num_outputs,
        ROWS=rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        SWAPPED=tiles.is_swapped,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=("capacity",))
def _contract_kernel(
    active,
    weights,
    down,
    parts,
    order,
    blocks,
    capacity,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    first_row = tl.load(blocks + capacity + block)
    row = first_row + tl.arange(0, ROWS)
    is_row = row < tl.load(blocks + 2 * capacity + block)
    choice = tl.load(order + row, mask=is_row, other=0)
    weight = tl.load(weights + choice, mask=is_row, other=0.0).to(tl.float32)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Rows beyond the expert's repeat its first and columns beyond the last wrap: neither is stored.
    x = active + tl.where(is_row, row, first_row).to(tl.int64)[:, None] * SIZE + k[None, :]
    first = down + expert.to(tl.int64) * (OUTPUTS * SIZE)
    w = first + (column % OUTPUTS)[:, None] * SIZE + k[None, :]
    if SWAPPED:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE, DEPTH):
        if SIZE % DEPTH == 0:
            inputs = tl.load(x + start)
            weight_part = tl.load(w + start)
        else:
            is_input = (start + k < SIZE)[None, :]
            inputs = tl.load(x + start, mask=is_input, other=0.0)
            weight_part = tl.load(w + start, mask=is_input, other=0.0)
        total = _multiply(inputs, weight_part, total, SWAPPED)
    target = choice.to(tl.int64) * OUTPUTS
    if SWAPPED:
        result = (total * weight[None, :]).to(parts.dtype.element_ty)
        mask = (column < OUTPUTS)[:, None] & is_row[None, :]
        tl.store(parts + target[None, :] + column[:, None], result, mask=mask)
    else:
        result = (total * weight[:, None]).to(parts.dtype.element_ty)
        mask = is_row[:, None] & (column < OUTPUTS)[None, :]
        tl.store(parts + target[:, None] + column[None, :], result, mask=mask)
