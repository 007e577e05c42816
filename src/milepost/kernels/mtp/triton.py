"""What an MTP head reads, on a GPU: each of `reference`'s functions in one launch.

Legend: T tokens, V vocabulary, C hidden size, W states to be carried.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.mtp.rows import CarryRows
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs


def join(
    token_ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    scales: tuple[Tensor, Tensor],
    eps: float,
    carried: Tensor | None = None,
    rows: CarryRows | None = None,
) -> Tensor:
    """As `reference.join`; rows of `hidden` and slots of `carried` may lie apart."""
    num_tokens, size = hidden.shape
    joined = hidden.new_empty(num_tokens, 2 * size)
    columns = triton.next_power_of_2(size)
    is_shifted = rows is not None and carried is not None
    _join_kernel[(num_tokens, 2)](
        token_ids,
        table,
        hidden,
        carried if is_shifted else hidden,
        rows.sources if is_shifted else token_ids,
        *scales,
        joined,
        hidden.stride(0),
        carried.stride(0) if is_shifted else 0,
        eps,
        SHIFTED=is_shifted,
        SIZE=size,
        COLUMNS=columns,
        num_warps=min(32, max(1, columns // 128)),
        **OVERLAPPED,
    )
    return joined


@triton.jit(do_not_specialize=["slot_stride"])
def _join_kernel(
    token_ids,
    table,
    hidden,
    carried,
    sources,
    embedding_scale,
    hidden_scale,
    joined,
    hidden_stride,
    slot_stride,
    eps,
    SHIFTED: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The embedding of a token, or the hidden state before it."""
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    wait_for_inputs()
    if half == 0:
        row = tl.load(token_ids + token)
        x = tl.load(table + row * SIZE + column, mask=inside, other=0.0)
        b_scale = tl.load(embedding_scale + column, mask=inside, other=0.0)
    else:
        b_scale = tl.load(hidden_scale + column, mask=inside, other=0.0)
        p_before = hidden + token * hidden_stride
        if SHIFTED:
            slot = tl.load(sources + token).to(tl.int64)
            p_before = hidden + tl.maximum(token - 1, 0) * hidden_stride
            if slot >= 0:
                p_before = carried + slot * slot_stride
        x = tl.load(p_before + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    result = wide * norm * b_scale.to(tl.float32)
    tl.store(joined + (2 * token + half) * SIZE + column, result.to(x.dtype), mask=inside)


def keep(hidden: Tensor, carried: Tensor, rows: CarryRows) -> None:
    """As `reference.keep`; targets of -1 are padding."""
    size = hidden.shape[1]
    columns = triton.next_power_of_2(size)
    _keep_kernel[(len(rows.targets),)](
        hidden,
        carried,
        rows.targets,
        hidden.stride(0),
        carried.stride(0),
        SIZE=size,
        COLUMNS=columns,
        num_warps=min(32, max(1, columns // 256)),
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=["slot_stride"])
def _keep_kernel(
    hidden,
    carried,
    targets,
    hidden_stride,
    slot_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One state."""
    let_next_start()
    wait_for_inputs()
    token = tl.load(targets + 2 * tl.program_id(0)).to(tl.int64)
    slot = tl.load(targets + 2 * tl.program_id(0) + 1).to(tl.int64)
    if slot < 0:
        return
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    x = tl.load(hidden + token * hidden_stride + column, mask=inside, other=0.0)
    tl.store(carried + slot * slot_stride + column, x, mask=inside)
