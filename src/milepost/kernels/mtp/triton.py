"""The inputs of an MTP head on a GPU: each of `mtp`'s functions in one launch.

Legend: T tokens, V vocabulary, C hidden size, W states to be carried, N numbers of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.mtp import Carried, CarryRows
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import norm_row
from milepost.kernels.platform.tensors import cdiv, check_contiguous, next_power_of_2

_BLOCK = 2048
"""Numbers of a state that one program copies, at most."""


def join(
    hidden: Tensor,
    token_ids: Tensor,
    table: Tensor,
    scales: tuple[Tensor, Tensor],
    eps: float,
    carried: tuple[Carried, CarryRows] | None = None,
) -> Tensor:
    """See `mtp.join`; rows of `hidden` and slots of `carried` may be strided."""
    num_tokens, size = hidden.shape
    joined = hidden.new_empty(num_tokens, 2 * size)
    columns = next_power_of_2(size)
    _join_kernel[(num_tokens, 2)](
        token_ids,
        table,
        hidden,
        hidden.stride(0),
        *((None, None, 0, 0) if carried is None else _states(carried[0])),
        None if carried is None else carried[1].sources,
        *scales,
        joined,
        eps,
        SIZE=size,
        COLUMNS=columns,
        num_warps=min(32, max(1, columns // 128)),
        **OVERLAPPED,
    )
    return joined


def _states(carried: Carried) -> tuple[Tensor, Tensor | None, int, int]:
    """Returns states and records, entries from slot to slot, and drafts of a row of records."""
    states, records = carried.states, carried.records
    return states, records, states.stride(0), 0 if records is None else records.shape[1]


@quick
@triton.jit(do_not_specialize=["slot_stride", "num_drafts"])
def _join_kernel(
    token_ids,
    table,
    hidden,
    hidden_stride,
    carried,
    records,
    slot_stride,
    num_drafts,
    sources,
    embedding_scale,
    hidden_scale,
    joined,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norms the embedding of a token, or the hidden state before it."""
    launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    i_half = tl.program_id(1)
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    wait_for_inputs()
    if i_half == 0:
        row = tl.load(token_ids + i_t)
        b_x = tl.load(table + row * SIZE + o_h, mask=is_h, other=0.0)
        b_scale = tl.load(embedding_scale + o_h, mask=is_h, other=0.0)
    else:
        b_scale = tl.load(hidden_scale + o_h, mask=is_h, other=0.0)
        p_before = hidden + i_t * hidden_stride
        if sources is not None:
            where = tl.load(sources + 2 * i_t).to(tl.int64)
            place = tl.load(sources + 2 * i_t + 1)
            p_before = hidden + tl.maximum(i_t - 1, 0) * hidden_stride
            if where >= 0:
                p_before = carried + where * slot_stride
                if records is not None:  # noqa: SIM102  decided when compiled
                    if place >= 0:
                        p_before = records + (where * num_drafts + place) * SIZE
        b_x = tl.load(p_before + o_h, mask=is_h, other=0.0)
    b_o = norm_row(b_x, b_scale.to(tl.float32), eps, SIZE)
    tl.store(joined + (2 * i_t + i_half) * SIZE + o_h, b_o, mask=is_h)


def keep(hidden: Tensor, carried: Carried, rows: CarryRows) -> None:
    """See `mtp.keep`; rows of `hidden` may be strided."""
    _keep(hidden, hidden, carried, rows, slice(None), by_token=True)


def keep_states(
    states: Tensor, recorded: Tensor | None, carried: Carried, rows: CarryRows, columns: slice
) -> None:
    """See `mtp.keep_states`."""
    check_contiguous(states=states)
    _keep(states, recorded, carried, rows, columns, by_token=False)


def _keep(
    states: Tensor,
    recorded: Tensor | None,
    carried: Carried,
    rows: CarryRows,
    columns: slice,
    *,
    by_token: bool,
) -> None:
    """Launches `_keep_kernel` for states [T, N] `by_token`, or [W, N]."""
    (size, num_targets), records = (states.shape[1], len(rows.targets)), carried.records
    num_recorded = 0 if records is None or recorded is None else len(recorded)
    block = min(_BLOCK, next_power_of_2(size))
    _keep_kernel[(num_targets + num_recorded, cdiv(size, block))](
        states,
        recorded,
        states.stride(0),
        carried.states[:, columns],
        None if records is None else records[..., columns],
        carried.states.stride(0),
        *((0, 0) if records is None else records.stride()[:2]),
        rows.targets,
        rows.recorded,
        num_targets,
        SIZE=size,
        BLOCK=block,
        BY_TOKEN=by_token,
        num_warps=max(1, block // 256),
        **OVERLAPPED,
    )


@quick
@triton.jit(
    do_not_specialize=["slot_stride", "row_stride", "draft_stride", "num_targets"],
    do_not_specialize_on_alignment=["targets", "drafts"],
)
def _keep_kernel(
    states,
    recorded,
    stride,
    carried,
    records,
    slot_stride,
    row_stride,
    draft_stride,
    targets,
    drafts,
    num_targets,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """Writes some numbers of one state: first those for slots, then those for records."""
    launch_dependents()
    i_n = tl.program_id(0)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_c = o_c < SIZE
    wait_for_inputs()
    if i_n < num_targets:
        i_t = tl.load(targets + 4 * i_n).to(tl.int64)
        slot = tl.load(targets + 4 * i_n + 1).to(tl.int64)
        if slot < 0:
            return
        p_state = states + (i_t if BY_TOKEN else i_n.to(tl.int64)) * stride
        if i_t < 0:
            if records is None:
                return
            else:
                row = tl.load(targets + 4 * i_n + 2).to(tl.int64)
                place = tl.load(targets + 4 * i_n + 3).to(tl.int64)
                p_state = records + row * row_stride + place * draft_stride
        b_state = tl.load(p_state + o_c, is_c)
        tl.store(carried + slot * slot_stride + o_c, b_state, is_c)
    elif records is not None:
        i_t = (i_n - num_targets).to(tl.int64)
        row = tl.load(drafts + 2 * i_t).to(tl.int64)
        if row >= 0:
            place = tl.load(drafts + 2 * i_t + 1).to(tl.int64)
            b_state = tl.load(recorded + i_t * stride + o_c, is_c)
            tl.store(records + row * row_stride + place * draft_stride + o_c, b_state, is_c)
