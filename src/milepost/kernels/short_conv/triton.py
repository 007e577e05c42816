"""Gated short convolutions on a GPU, in two launches: outputs, then the states that are written,
for other programs of the first one read what the second one may overwrite. Where sequences have one
token each, a program makes its output and then its states, in one launch.

Legend: T tokens, C channels, J taps.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv, next_power_of_2
from milepost.kernels.short_conv import ShortConvItems

_ROWS, _BLOCK = 16, 128
"""Tokens and channels of a program."""


class ConvInputs(NamedTuple):
    """The step's projections [T, 3 * C], states [rows, C, J - 1], and records [rows, inputs, C] or
    None."""

    projected: Any
    stride: Any
    pool: Any
    records: Any


class Beginnings(NamedTuple):
    """Each sequence's first token, row of its state, row of its records, and drafts taken since: as
    in `ShortConvItems`, or of one sequence."""

    begin: Any
    row: Any
    record: Any
    recorded: Any


class ConvOutputs(NamedTuple):
    """The outputs [T, C], their weight, bias or None, and each token's sequence. All are None
    where a launch makes no outputs."""

    weight: Any
    bias: Any
    token_sequence: Any
    output: Any


class StateWrites(NamedTuple):
    """Fields of `ShortConvItems`."""

    drafts: Any
    first: Any
    end: Any
    row: Any


class ConvSizes(NamedTuple):
    """How the kernels are compiled; a constant on the device."""

    channels: int
    taps: int
    recorded: int
    """Inputs of a row of the records, 0 where nothing is drafted."""
    block: int


_BEGINNINGS = attrgetter("sequence_begin", "sequence_row", "sequence_record", "sequence_recorded")
_WRITES = attrgetter("sequence_drafts", "sequence_place", "place_end", "place_row")


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
    rows, blocks = min(_ROWS, next_power_of_2(num_tokens)), cdiv(channels, _BLOCK)
    inputs = ConvInputs(projected, projected.stride(0), pool, records)
    beginnings = Beginnings(*_BEGINNINGS(items))
    sizes = ConvSizes(channels, taps, 0 if records is None else records.shape[1], _BLOCK)
    options = {"SIZES": sizes, "num_warps": 4, **OVERLAPPED}
    outputs = ConvOutputs(weight, bias, items.token_sequence, output)
    if not items.decodes:
        grid = blocks, cdiv(num_tokens, rows)
        _mix_kernel[grid](inputs, beginnings, outputs, num_tokens, ROWS=rows, **options)
        outputs = ConvOutputs(None, None, None, None)
    _keep_kernel[(blocks, len(items.sequence_begin))](
        inputs,
        beginnings,
        StateWrites(*_WRITES(items)),
        outputs,
        BLOCK_TAPS=next_power_of_2(taps),
        **options,
    )
    return output


@quick
@triton.jit(
    do_not_specialize=["num_tokens"],
    # Arrays that begin anywhere in a buffer.
    do_not_specialize_on_alignment=["beginnings", "outputs"],
)
def _mix_kernel(inputs, beginnings, outputs, num_tokens, ROWS: tl.constexpr, SIZES: tl.constexpr):
    """Convolves ROWS tokens of a block of channels."""
    launch_dependents()
    o_c = tl.program_id(0) * SIZES.block + tl.arange(0, SIZES.block)
    o_t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_token = o_t < num_tokens
    sequence = tl.load(outputs.token_sequence + o_t, is_token, -1)
    is_real = sequence >= 0
    begin = tl.load(beginnings.begin + sequence, is_real, 0)
    row = tl.load(beginnings.row + sequence, is_real, 0).to(tl.int64)
    own = Beginnings(begin, row, row, row)
    if SIZES.recorded:
        record = tl.load(beginnings.record + sequence, is_real, 0).to(tl.int64)
        own = Beginnings(begin, row, record, tl.load(beginnings.recorded + sequence, is_real, -1))
    wait_for_inputs()
    _convolve(inputs, own, outputs, o_t, o_c, is_real, is_token, SIZES)


@triton.jit
def _convolve(inputs, own, outputs, o_t, o_c, is_real, is_token, SIZES: tl.constexpr):
    """Makes the outputs of tokens o_t; those that are not real are zeros."""
    CHANNELS: tl.constexpr = SIZES.channels
    TAPS: tl.constexpr = SIZES.taps
    is_c = o_c < CHANNELS
    inside = is_real[:, None] & is_c[None, :]
    dtype: tl.constexpr = outputs.output.dtype.element_ty
    x = tl.zeros(inside.shape, tl.float32)
    if outputs.bias is not None:
        x += tl.load(outputs.bias + o_c, is_c, 0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        source = o_t - (TAPS - 1) + tap
        b_x = _load(inputs, own, source, o_c, inside, SIZES, dtype)
        taps = tl.load(outputs.weight + o_c * TAPS + tap, is_c, 0).to(tl.float32)
        x += b_x.to(tl.float32) * taps[None, :]
    o_row = o_t.to(tl.int64)[:, None]
    b_gate = tl.load(inputs.projected + o_row * inputs.stride + CHANNELS + o_c[None, :], inside, 0)
    b_o = x.to(dtype).to(tl.float32) * b_gate.to(tl.float32)
    b_o = tl.where(inside, b_o, 0.0)
    at = o_row * CHANNELS + o_c[None, :]
    tl.store(outputs.output + at, b_o.to(dtype), is_token[:, None] & is_c[None, :])


@triton.jit
def _load(inputs, own, source, o_c, inside, SIZES: tl.constexpr, dtype: tl.constexpr):
    """Returns the convolution's inputs at tokens `source`, [tokens, channels]: the step's own, or
    from the state before it, or from what was recorded of the step before."""
    CHANNELS: tl.constexpr = SIZES.channels
    TAPS: tl.constexpr = SIZES.taps
    is_new = inside & (source >= own.begin)[:, None]
    p_token = inputs.projected + source.to(tl.int64)[:, None] * inputs.stride + o_c[None, :]
    b_before = tl.load(p_token, is_new, 0).to(tl.float32)
    b_x = tl.load(p_token + 2 * CHANNELS, is_new, 0).to(tl.float32)
    kept = own.row * (CHANNELS * (TAPS - 1)) + source - own.begin + TAPS - 1
    p_old = inputs.pool + kept[:, None] + o_c[None, :] * (TAPS - 1)
    is_old = inside & (source < own.begin)[:, None]
    if SIZES.recorded:
        # The state beside a page may be that of rejected drafts.
        is_again = is_old & tl.broadcast_to(own.recorded >= 0, source.shape)[:, None]
        number = own.record * SIZES.recorded + own.recorded + source - own.begin + TAPS - 1
        p_again = inputs.records + number[:, None] * CHANNELS + o_c[None, :]
        b_again = tl.load(p_again, is_again, 0).to(dtype)
        b_old = tl.load(p_old, is_old & ~is_again, 0).to(dtype)
        return tl.where(is_new, (b_before * b_x).to(dtype), tl.where(is_again, b_again, b_old))
    b_old = tl.load(p_old, is_old, 0)
    return tl.where(is_new, (b_before * b_x).to(dtype), b_old.to(dtype))


@quick
@triton.jit(do_not_specialize_on_alignment=["beginnings", "writes", "outputs"])
def _keep_kernel(
    inputs, beginnings, writes, outputs, BLOCK_TAPS: tl.constexpr, SIZES: tl.constexpr
):
    """Writes a block of channels of all states that a sequence leaves, and of its drafts' records;
    of its token's output first, if there are outputs."""
    CHANNELS: tl.constexpr = SIZES.channels
    TAPS: tl.constexpr = SIZES.taps
    launch_dependents()
    i_s = tl.program_id(1)
    first, last = tl.load(writes.first + i_s), tl.load(writes.first + i_s + 1)
    begin = tl.load(beginnings.begin + i_s)
    row = tl.load(beginnings.row + i_s).to(tl.int64)
    own = Beginnings(begin, row, row, row)
    o_c = tl.program_id(0) * SIZES.block + tl.arange(0, SIZES.block)
    o_tap = tl.arange(0, BLOCK_TAPS)
    inside = (o_tap < TAPS - 1)[:, None] & (o_c < CHANNELS)[None, :]
    dtype: tl.constexpr = inputs.pool.dtype.element_ty
    if SIZES.recorded:
        record = tl.load(beginnings.record + i_s).to(tl.int64)
        own = Beginnings(begin, row, record, tl.load(beginnings.recorded + i_s))
        drafts = tl.load(writes.drafts + i_s)
        num_recorded = tl.where(drafts > 0, TAPS - 1 + drafts, 0)
        # What is read may be written: beside the page it is below, in the records it is last.
        num_early = tl.where(own.recorded < 0, num_recorded, 0)
        num_late = num_recorded - num_early
    # Before the launch ahead has ended, its programs may read what is written here.
    wait_for_inputs()
    if outputs.output is not None:
        # A sequence may have no token, and padding has no sequence.
        o_t = begin + tl.arange(0, 1)
        is_own = tl.load(outputs.token_sequence + o_t) == i_s
        _convolve(inputs, own, outputs, o_t, o_c, is_own, is_own, SIZES)
        o_t = i_s + tl.arange(0, 1)
        is_padding = tl.load(outputs.token_sequence + o_t) < 0
        p_padding = outputs.output + o_t.to(tl.int64)[:, None] * CHANNELS + o_c[None, :]
        BLOCK: tl.constexpr = SIZES.block
        zeros = tl.zeros([1, BLOCK], outputs.output.dtype.element_ty)
        tl.store(p_padding, zeros, is_padding[:, None] & (o_c < CHANNELS)[None, :])
    if SIZES.recorded:
        _record(inputs, own, o_c, num_early, BLOCK_TAPS, SIZES, dtype)
    for place in range(first, last):
        source = tl.load(writes.end + place) - (TAPS - 1) + o_tap
        b_state = _load(inputs, own, source, o_c, inside, SIZES, dtype)
        tl.debug_barrier()
        written = tl.load(writes.row + place).to(tl.int64) * (CHANNELS * (TAPS - 1))
        p_state = inputs.pool + written + o_tap[:, None] + o_c[None, :] * (TAPS - 1)
        tl.store(p_state, b_state, inside)
    if SIZES.recorded:
        _record(inputs, own, o_c, num_late, BLOCK_TAPS, SIZES, dtype)


@triton.jit
def _record(
    inputs,
    own,
    o_c,
    num_recorded,
    BLOCK_TAPS: tl.constexpr,
    SIZES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Records the inputs before a sequence's drafts and theirs: what is recorded already is read
    further on than it is written."""
    o_input = tl.arange(0, BLOCK_TAPS)
    for number in range(0, num_recorded, BLOCK_TAPS):
        inside = (number + o_input < num_recorded)[:, None] & (o_c < SIZES.channels)[None, :]
        source = own.begin + 2 - SIZES.taps + number + o_input
        b_inputs = _load(inputs, own, source, o_c, inside, SIZES, dtype)
        tl.debug_barrier()
        o_record = own.record * SIZES.recorded + number + o_input
        p_record = inputs.records + o_record[:, None] * SIZES.channels + o_c[None, :]
        tl.store(p_record, b_inputs, inside)
        tl.debug_barrier()
