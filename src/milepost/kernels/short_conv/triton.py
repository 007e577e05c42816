"""Gated short convolutions on a GPU, in two launches: outputs, then the states that are written,
for other programs of the first one read what the second one may overwrite.

Legend: T tokens, C channels, J taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.short_conv.items import ShortConvItems

_ROWS, _BLOCK = 16, 128
"""Tokens and channels of a program."""


def mix(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    items: ShortConvItems,
    records: Tensor | None = None,
) -> Tensor:
    """See `short_conv.mix`."""
    num_tokens, (channels, taps) = len(projected), weight.shape
    output = torch.empty(num_tokens, channels, dtype=projected.dtype, device=projected.device)
    rows = min(_ROWS, triton.next_power_of_2(num_tokens))
    blocks = triton.cdiv(channels, _BLOCK)
    sizes = {"CHANNELS": channels, "TAPS": taps, "BLOCK": _BLOCK}
    common = projected, projected.stride(0)
    states = pool, items.sequence_begin, items.sequence_row
    recorded = records, items.sequence_record, items.sequence_recorded
    sizes["RECORDED"] = 0 if records is None else records.shape[1]
    _mix_kernel[(blocks, triton.cdiv(num_tokens, rows))](
        *common,
        weight,
        bias,
        *states,
        *recorded,
        items.token_sequence,
        output,
        num_tokens,
        **sizes,
        ROWS=rows,
        num_warps=4,
        **OVERLAPPED,
    )
    _keep_kernel[(blocks, len(items.sequence_begin))](
        *common,
        *states,
        *recorded,
        items.sequence_drafts,
        items.sequence_place,
        items.place_end,
        items.place_row,
        **sizes,
        BLOCK_TAPS=triton.next_power_of_2(taps),
        num_warps=4,
        **OVERLAPPED,
    )
    return output


_UNSPECIALISED = [
    "sequence_begin",
    "sequence_row",
    "token_sequence",
    "sequence_place",
    "place_end",
    "place_row",
    "sequence_record",
    "sequence_recorded",
    "sequence_drafts",
]
"""Arrays that begin anywhere in a buffer."""


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_UNSPECIALISED)
def _mix_kernel(
    projected,
    stride,
    weight,
    bias,
    pool,
    sequence_begin,
    sequence_row,
    records,
    sequence_record,
    sequence_recorded,
    token_sequence,
    output,
    num_tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens of BLOCK channels."""
    launch_dependents()
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_c, is_token = o_c < CHANNELS, o_t < num_tokens
    sequence = tl.load(token_sequence + o_t, is_token, -1)
    is_real = sequence >= 0
    begin = tl.load(sequence_begin + sequence, is_real, 0)
    row = tl.load(sequence_row + sequence, is_real, 0).to(tl.int64)
    old = pool, row, records, row, row
    if RECORDED:
        record = tl.load(sequence_record + sequence, is_real, 0).to(tl.int64)
        recorded = tl.load(sequence_recorded + sequence, is_real, -1)
        old = pool, row, records, record, recorded
    wait_for_inputs()
    inside = is_real[:, None] & is_c[None, :]
    dtype: tl.constexpr = output.dtype.element_ty
    x = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        x += tl.load(bias + o_c, is_c, 0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        source = o_t - (TAPS - 1) + tap
        args = projected, stride, old, begin, source, o_c, inside
        inputs = _inputs(*args, CHANNELS, TAPS, RECORDED, dtype)
        taps = tl.load(weight + o_c * TAPS + tap, is_c, 0).to(tl.float32)
        x += inputs.to(tl.float32) * taps[None, :]
    p_gate = projected + o_t.to(tl.int64)[:, None] * stride + CHANNELS + o_c[None, :]
    b_gate = tl.load(p_gate, inside, 0)
    at = o_t.to(tl.int64)[:, None] * CHANNELS + o_c[None, :]
    b_o = x.to(dtype).to(tl.float32) * b_gate.to(tl.float32)
    b_o = tl.where(inside, b_o, 0.0)
    tl.store(output + at, b_o.to(dtype), is_token[:, None] & is_c[None, :])


@triton.jit
def _inputs(
    projected,
    stride,
    old,
    begin,
    source,
    o_c,
    inside,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDED: tl.constexpr,
    dtype: tl.constexpr,
):
    """The convolution's inputs at tokens `source`, [tokens, channels]: the step's own, or from the
    state before it, or from what was recorded of the step before."""
    pool, row, records, record, recorded = old
    is_new = inside & (source >= begin)[:, None]
    p_token = projected + source.to(tl.int64)[:, None] * stride + o_c[None, :]
    b_before = tl.load(p_token, is_new, 0).to(tl.float32)
    b_x = tl.load(p_token + 2 * CHANNELS, is_new, 0).to(tl.float32)
    kept = row * (CHANNELS * (TAPS - 1)) + source - begin + TAPS - 1
    p_old = pool + kept[:, None] + o_c[None, :] * (TAPS - 1)
    is_old = inside & (source < begin)[:, None]
    if RECORDED:
        # It may be that of drafts which were rejected.
        is_again = is_old & tl.broadcast_to(recorded >= 0, source.shape)[:, None]
        number = record * RECORDED + recorded + source - begin + TAPS - 1
        p_again = records + number[:, None] * CHANNELS + o_c[None, :]
        b_again = tl.load(p_again, is_again, 0).to(dtype)
        b_old = tl.load(p_old, is_old & ~is_again, 0).to(dtype)
        return tl.where(is_new, (b_before * b_x).to(dtype), tl.where(is_again, b_again, b_old))
    b_old = tl.load(p_old, is_old, 0)
    return tl.where(is_new, (b_before * b_x).to(dtype), b_old.to(dtype))


@quick
@triton.jit(do_not_specialize_on_alignment=_UNSPECIALISED)
def _keep_kernel(
    projected,
    stride,
    pool,
    sequence_begin,
    sequence_row,
    records,
    sequence_record,
    sequence_recorded,
    sequence_drafts,
    sequence_place,
    place_end,
    place_row,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """BLOCK channels of all states that a sequence leaves, and of its drafts' records."""
    launch_dependents()
    i_s = tl.program_id(1)
    first, last = tl.load(sequence_place + i_s), tl.load(sequence_place + i_s + 1)
    begin = tl.load(sequence_begin + i_s)
    row = tl.load(sequence_row + i_s).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_tap = tl.arange(0, BLOCK_TAPS)
    inside = (o_tap < TAPS - 1)[:, None] & (o_c < CHANNELS)[None, :]
    dtype: tl.constexpr = pool.dtype.element_ty
    old = pool, row, records, row, row
    if RECORDED:
        record = tl.load(sequence_record + i_s).to(tl.int64)
        recorded = tl.load(sequence_recorded + i_s)
        drafts = tl.load(sequence_drafts + i_s)
        num_recorded = tl.where(drafts > 0, TAPS - 1 + drafts, 0)
        # What is read may be written: beside the page it is below, in the records it is last.
        num_early = tl.where(recorded < 0, num_recorded, 0)
        num_late = num_recorded - num_early
        old = pool, row, records, record, recorded
    # Before the launch ahead has ended, its programs may read what is written here.
    wait_for_inputs()
    if RECORDED:
        args = projected, stride, old, begin, o_c, num_early
        _record(*args, CHANNELS, TAPS, RECORDED, BLOCK_TAPS, dtype)
    for place in range(first, last):
        source = tl.load(place_end + place) - (TAPS - 1) + o_tap
        parts = projected, stride, old, begin, source, o_c, inside
        b_state = _inputs(*parts, CHANNELS, TAPS, RECORDED, dtype)
        tl.debug_barrier()
        written = tl.load(place_row + place).to(tl.int64) * (CHANNELS * (TAPS - 1))
        p_state = pool + written + o_tap[:, None] + o_c[None, :] * (TAPS - 1)
        tl.store(p_state, b_state, inside)
    if RECORDED:
        args = projected, stride, old, begin, o_c, num_late
        _record(*args, CHANNELS, TAPS, RECORDED, BLOCK_TAPS, dtype)


@triton.jit
def _record(
    projected,
    stride,
    old,
    begin,
    o_c,
    num_recorded,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    RECORDED: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Record the inputs before a sequence's drafts and theirs: what is recorded already is read
    further on than it is written."""
    _, _, records, record, _ = old
    o_input = tl.arange(0, BLOCK_TAPS)
    for number in range(0, num_recorded, BLOCK_TAPS):
        inside = (number + o_input < num_recorded)[:, None] & (o_c < CHANNELS)[None, :]
        source = begin + 2 - TAPS + number + o_input
        parts = projected, stride, old, begin, source, o_c, inside
        b_inputs = _inputs(*parts, CHANNELS, TAPS, RECORDED, dtype)
        tl.debug_barrier()
        p_record = records + (record * RECORDED + number + o_input)[:, None] * CHANNELS
        tl.store(p_record + o_c[None, :], b_inputs, inside)
        tl.debug_barrier()
