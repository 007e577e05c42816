"""Operations around a vision tower's attention on a GPU: those of `vision`, each in one
launch.

Legend: P patches of one picture, B bytes of a patch, F frames of a patch, X pixels of a patch in
one frame, D hidden size, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.tensors import check_contiguous, next_power_of_2


def normalise(rows: Tensor, table: Tensor, num_frames: int, num_pixels: int) -> Tensor:
    """See `vision.normalise`."""
    check_contiguous(rows=rows, table=table)
    num_patches, num_bytes = rows.shape
    channels, num_values = table.shape
    num_outputs = channels * num_frames * num_pixels
    output = torch.empty(num_patches, num_outputs, dtype=table.dtype, device=rows.device)
    _normalise_kernel[(num_patches,)](
        rows,
        table,
        output,
        PIXELS=num_pixels,
        FRAMES=num_frames,
        HELD=num_bytes // (channels * num_pixels),
        VALUES=num_values,
        OUTPUTS=num_outputs,
        COLUMNS=next_power_of_2(num_outputs),
        num_warps=4,
    )
    return output


@quick
@triton.jit
def _normalise_kernel(
    rows,
    table,
    output,
    PIXELS: tl.constexpr,
    FRAMES: tl.constexpr,
    HELD: tl.constexpr,
    VALUES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, COLUMNS)
    mask = place < OUTPUTS
    channel, frame = place // (FRAMES * PIXELS), place // PIXELS % FRAMES
    # A row that holds one frame stands for all.
    held = (channel * HELD + (frame if HELD > 1 else 0)) * PIXELS + place % PIXELS
    BYTES: tl.constexpr = OUTPUTS // FRAMES * HELD
    value = tl.load(rows + patch * BYTES + held, mask=mask, other=0).to(tl.int32)
    number = tl.load(table + channel * VALUES + value, mask=mask)
    tl.store(output + patch * OUTPUTS + place, number, mask=mask)


def add_positions(
    hidden: Tensor, table: Tensor, places: tuple[Tensor, Tensor], size: tuple[int, int]
) -> Tensor:
    """See `vision.add_positions`; sums are float32."""
    check_contiguous(hidden=hidden, table=table)
    num_patches, width = hidden.shape
    output = torch.empty_like(hidden)
    _add_positions_kernel[(num_patches,)](
        hidden,
        table,
        *places,
        output,
        max(size[0] - 1, 1),
        max(size[1] - 1, 1),
        SIDE=round(len(table) ** 0.5),
        SIZE=width,
        COLUMNS=next_power_of_2(width),
        num_warps=4,
    )
    return output


@quick
@triton.jit(do_not_specialize=("last_row", "last_column"))
def _add_positions_kernel(
    hidden,
    table,
    rows,
    columns,
    output,
    last_row,
    last_column,
    SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, COLUMNS)
    mask = place < SIZE
    row = tl.load(rows + patch).to(tl.float32) * (SIDE - 1) / last_row.to(tl.float32)
    column = tl.load(columns + patch).to(tl.float32) * (SIDE - 1) / last_column.to(tl.float32)
    top, left = tl.floor(row), tl.floor(column)
    down, right = row - top, column - left
    first, before = top.to(tl.int32), left.to(tl.int32)
    second, after = tl.minimum(first + 1, SIDE - 1), tl.minimum(before + 1, SIDE - 1)
    total = _entry(table, first * SIDE + before, place, mask, SIZE) * ((1 - down) * (1 - right))
    total += _entry(table, first * SIDE + after, place, mask, SIZE) * ((1 - down) * right)
    total += _entry(table, second * SIDE + before, place, mask, SIZE) * (down * (1 - right))
    total += _entry(table, second * SIDE + after, place, mask, SIZE) * (down * right)
    own = tl.load(hidden + patch * SIZE + place, mask=mask, other=0.0)
    # Rounded before it is added, as in the definition.
    added = total.to(own.dtype).to(tl.float32) + own.to(tl.float32)
    tl.store(output + patch * SIZE + place, added.to(own.dtype), mask=mask)


@triton.jit
def _entry(table, number, place, mask, SIZE: tl.constexpr):
    return tl.load(table + number * SIZE + place, mask=mask, other=0.0).to(tl.float32)


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `vision.add_norm`; sums are float32."""
    check_contiguous(hidden=hidden, **({} if delta is None else {"delta": delta}))
    num_patches, width = hidden.shape
    normed = torch.empty_like(hidden)
    total = hidden if delta is None else torch.empty_like(hidden)
    columns = next_power_of_2(width)
    _add_norm_kernel[(num_patches,)](
        hidden,
        delta,
        weight,
        bias,
        total,
        normed,
        eps,
        SIZE=width,
        COLUMNS=columns,
        num_warps=max(1, min(8, columns // 256)),
    )
    return total, normed


@quick
@triton.jit
def _add_norm_kernel(
    hidden, delta, weight, bias, total, normed, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * SIZE
    place = tl.arange(0, COLUMNS)
    mask = place < SIZE
    own = tl.load(hidden + first + place, mask=mask, other=0.0)
    if delta is not None:
        own = (own.to(tl.float32) + tl.load(delta + first + place, mask=mask, other=0.0)).to(
            own.dtype
        )
        tl.store(total + first + place, own, mask=mask)
    x = own.to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    b_weight = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    b_bias = tl.load(bias + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + first + place, (centred * scale * b_weight + b_bias).to(own.dtype), mask=mask)


def multiply_gelu(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `vision.multiply_gelu`; one launch of torch's GEMM, which has the same GELU."""
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
