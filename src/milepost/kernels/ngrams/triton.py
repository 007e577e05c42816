"""Triton: keeps the states of n-gram embeddings, as `ngrams.keep` defines it, in one launch.

Legend: W states that are kept, R tokens that may be drafts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.mtp import Carried, CarryRows
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_contiguous
from milepost.kernels.platform.tiles import cdiv

_BLOCK = 2048


def keep(
    states: Tensor, recorded: Tensor | None, carried: Carried, rows: CarryRows, columns: slice
) -> None:
    """See `ngrams.keep`."""
    check_contiguous(states=states)
    (num_states, size), records, num_recorded = states.shape, carried.records, 0
    if recorded is not None:
        check_contiguous(recorded=recorded)
        num_recorded = len(recorded)
    _keep_kernel[(num_states + num_recorded, cdiv(size, _BLOCK))](
        states,
        recorded,
        carried.states[:, columns],
        None if records is None else records[..., columns],
        carried.states.stride(0),
        *((0, 0) if records is None else records.stride()[:2]),
        rows.targets,
        rows.recorded,
        num_states,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
@triton.jit(
    do_not_specialize=["slot_stride", "row_stride", "draft_stride", "num_states"],
    do_not_specialize_on_alignment=["targets", "drafts"],
)
def _keep_kernel(
    states,
    recorded,
    carried,
    records,
    slot_stride,
    row_stride,
    draft_stride,
    targets,
    drafts,
    num_states,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes some numbers of one state: first those for slots, then those for records."""
    launch_dependents()
    i_n = tl.program_id(0)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_c = o_c < SIZE
    wait_for_inputs()
    if i_n < num_states:
        slot = tl.load(targets + 4 * i_n + 1).to(tl.int64)
        if slot < 0:
            return
        p_state = states + i_n.to(tl.int64) * SIZE
        if tl.load(targets + 4 * i_n) < 0:
            if records is None:
                return
            else:
                row = tl.load(targets + 4 * i_n + 2).to(tl.int64)
                place = tl.load(targets + 4 * i_n + 3).to(tl.int64)
                p_state = records + row * row_stride + place * draft_stride
        b_state = tl.load(p_state + o_c, is_c)
        tl.store(carried + slot * slot_stride + o_c, b_state, is_c)
    elif records is not None:
        i_t = (i_n - num_states).to(tl.int64)
        row = tl.load(drafts + 2 * i_t).to(tl.int64)
        if row >= 0:
            place = tl.load(drafts + 2 * i_t + 1).to(tl.int64)
            b_state = tl.load(recorded + i_t * SIZE + o_c, is_c)
            tl.store(records + row * row_stride + place * draft_stride + o_c, b_state, is_c)
