"""One step of the decoding sequences of a recurrent mixer, on any chip that runs Triton.

A program works on some columns of a unit's states; a unit shares one key and query, or B and C (see
`structures.MixerSizes`). It convolves, advances the state token by token in registers, and reads
it.

Without drafts that is one launch: the last program of a unit to arrive, when all have read the
convolution's states that they share, moves these on, and norms and gates the unit's output. Which
program that is changes no bit: it reads what the others have stored. With drafts (VERIFIES) a
second launch does this for all new tokens, and records the drafts' inputs. Both take the same
operations for a token in the same order.

A slot that is written is read by no other sequence, so slot_out may be slot_in.

Legend: S sequences, T tokens, U units, K shared entries of a state, O own entries of a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.decode_layout import DecodeLayout
from milepost.kernels.device import num_sms
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.recurrent.stream import (
    TokenRows,
    convolve,
    keep_window,
    load_window,
    open_stream,
    record_drafts,
)
from milepost.kernels.recurrent.structures import (
    DraftRecords,
    MixerInputs,
    MixerSizes,
    ProjectedRows,
    Sequences,
    SlotStates,
    StepOutput,
)
from milepost.kernels.verify_layout import VerifyLayout

_STATE = 4096
"""Entries of a program's state, if a head has as many."""
_WARPS = 4
_COLUMNS = 512
"""Columns that a program of the second launch leaves to the next step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixer:
    """A mixer in a step: its inputs and weights, and its rule as functions of the device.

    `open_head(weights, head, o_shared, o_own, SIZES, HEADS)` reads what does not change from
    token to token. `advance(b_state, vectors, streams, place, head, weights, SIZES, VERIFIES)`
    returns the state [K, O] after a token, the vector [K] that reads it, and what is added to what
    was read. `finish(y, weight, gate, eps, WIDTH, squares)` norms and gates outputs, row by row;
    `squares` is the sum of squares of the one row, if it is known.
    """

    inputs: MixerInputs
    gate: ProjectedRows
    weights: Any
    sizes: MixerSizes
    open_head: Any
    advance: Any
    finish: Any


class Vectors(NamedTuple):
    """A token's inputs after the convolution, float32."""

    read: Any
    """[K] query, or C."""
    write: Any
    """[K] key, or B."""
    own: Any
    """[O] value, or x."""


class TakenToken(NamedTuple):
    """What a program takes in of a token."""

    vectors: Vectors
    window_read: Any
    window_write: Any
    window_own: Any


class Channels(NamedTuple):
    """Channels of the convolution that a program reads."""

    read: Any
    write: Any
    is_shared: Any
    """[K] of both."""
    own: Any
    is_own: Any


class Streams(NamedTuple):
    """The rows of a sequence."""

    mixed: TokenRows
    strengths: TokenRows
    decays: TokenRows


def decode(
    mixer: Mixer,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: DecodeLayout,
) -> Tensor:
    """Advance each sequence by one token; returns [S, U * GROUP * W], zeros for padding."""
    sequences = Sequences(None, None, None, None, slot_in, slot_out)
    output = _new_output(mixer, len(slot_out))
    pools = _pools(conv_pool, recurrent_pool)
    _launch(mixer, pools, sequences, None, layout.arrivals, output)
    return output.base


def verify(
    mixer: Mixer,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Fold recorded drafts, advance by one token, continue through drafts; writes `output` [T, U *
    GROUP * W] of the decoding sequences."""
    kept = DraftRecords(records, records.stride(0), records.stride(1))
    outputs = StepOutput(torch.empty_like(output, dtype=torch.float32), mixer.gate, output)
    pools = _pools(conv_pool, recurrent_pool)
    _launch(mixer, pools, Sequences(*layout.sequences), kept, None, outputs)
    finish(mixer, conv_pool, layout, records, outputs)


def finish(
    mixer: Mixer, conv_pool: Tensor, layout: VerifyLayout, records: Tensor, output: StepOutput
) -> None:
    """The second launch of `verify`: norm and gate what new tokens have read, move the
    convolution's states on, record the drafts."""
    sizes, most = mixer.sizes, records.shape[1] + 1
    num_columns = max(sizes.channels, sizes.strengths, sizes.decays)
    num_blocks = triton.cdiv(num_columns, _COLUMNS)
    _finish_kernel[(sizes.units * most + num_blocks, layout.num_sequences)](
        mixer.inputs,
        mixer.weights,
        SlotStates(conv_pool, conv_pool.stride(0)),
        Sequences(*layout.sequences),
        DraftRecords(records, records.stride(0), records.stride(1)),
        output,
        SIZES=sizes,
        FINISH=mixer.finish,
        MOST=most,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        **OVERLAPPED,
    )


def _pools(conv_pool: Tensor, recurrent_pool: Tensor) -> tuple[SlotStates, SlotStates]:
    return SlotStates(conv_pool, conv_pool.stride(0)), SlotStates(
        recurrent_pool, recurrent_pool.stride(0)
    )


def _new_output(mixer: Mixer, num_tokens: int) -> StepOutput:
    sizes, like = mixer.sizes, mixer.inputs.mixed.base
    width = sizes.units * sizes.group * sizes.own
    read = like.new_empty(num_tokens, width, dtype=torch.float32)
    return StepOutput(read, mixer.gate, like.new_empty(num_tokens, width))


def _launch(
    mixer: Mixer,
    pools: tuple[SlotStates, SlotStates],
    sequences: Sequences,
    records: DraftRecords | None,
    arrivals: Tensor | None,
    output: StepOutput,
) -> None:
    sizes, device = mixer.sizes, output.base.device
    num_sequences = len(sequences.slot_out)
    heads, columns = _cut(sizes, num_sequences, device, verifies=records is not None)
    parts = sizes.group // heads * triton.cdiv(heads * sizes.own, columns)
    entries = triton.next_power_of_2(sizes.shared) * columns
    _step_kernel[(parts, sizes.units, num_sequences)](
        mixer.inputs,
        mixer.weights,
        *pools,
        sequences,
        records,
        arrivals,
        output,
        SIZES=sizes,
        OPEN_HEAD=mixer.open_head,
        ADVANCE=mixer.advance,
        FINISH=mixer.finish,
        HEADS=heads,
        COLUMNS=columns,
        EARLY=parts * sizes.units * num_sequences <= num_sms(device),
        VERIFIES=records is not None,
        num_warps=min(16, max(_WARPS, entries // 2048)),
        **OVERLAPPED,
    )


def _cut(
    sizes: MixerSizes, num_sequences: int, device: torch.device, verifies: bool
) -> tuple[int, int]:
    """Heads and columns of a program: some columns of one head where a row of its state holds all
    columns, else whole heads, two if there is work for all SMs and registers for both."""
    if sizes.own_stride == 1:
        columns = _STATE // triton.next_power_of_2(sizes.shared)
        return 1, min(triton.next_power_of_2(sizes.own), columns)
    are_few = sizes.units * sizes.group * num_sequences < 4 * num_sms(device)
    heads = 1 if are_few or verifies or sizes.group % 2 else 2
    return heads, triton.next_power_of_2(heads * sizes.own)


@triton.jit(do_not_specialize_on_alignment=["sequences", "arrivals"])
def _step_kernel(
    inputs,
    weights,
    conv,
    states,
    sequences,
    records,
    arrivals,
    output,
    SIZES: tl.constexpr,
    OPEN_HEAD: tl.constexpr,
    ADVANCE: tl.constexpr,
    FINISH: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
    VERIFIES: tl.constexpr,
):
    """COLUMNS entries of HEADS heads of a unit: their states move on, and are read for new tokens.
    Without drafts the last program of a unit also writes the unit's output."""
    i_part, i_unit = tl.program_id(0), tl.program_id(1)
    i_sequence = tl.program_id(2).to(tl.int64)
    if EARLY:
        let_next_start()
    BLOCKS: tl.constexpr = (HEADS * SIZES.own + COLUMNS - 1) // COLUMNS
    WIDTH: tl.constexpr = SIZES.units * SIZES.group * SIZES.own
    i_head = i_unit * SIZES.group + i_part // BLOCKS * HEADS
    o_s = tl.arange(0, triton.next_power_of_2(SIZES.shared))
    o_own = i_part % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    is_s, is_own = o_s < SIZES.shared, o_own < HEADS * SIZES.own
    o_output = i_head * SIZES.own + o_own
    written = tl.load(sequences.slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        if not VERIFIES:
            zeros = tl.zeros([COLUMNS], output.base.dtype.element_ty)
            tl.store(output.base + i_sequence * WIDTH + o_output, zeros, is_own)
        return
    source = tl.load(sequences.slot_in + i_sequence).to(tl.int64)
    first_state = i_head * (SIZES.shared * SIZES.own)
    o_state = o_s[:, None] * SIZES.shared_stride + o_own[None, :] * SIZES.own_stride
    o_state += first_state
    in_state = is_s[:, None] & is_own[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(states.base + source * states.stride + o_state, in_state, 0).to(tl.float32)
    head = OPEN_HEAD(weights, i_head, o_s, o_own, SIZES, HEADS)
    streams = _open_streams(inputs, records, sequences, i_sequence, VERIFIES)
    o_shared = i_unit * SIZES.shared + o_s
    channels = Channels(
        SIZES.first_read + o_shared,
        SIZES.first_write + o_shared,
        is_s,
        SIZES.first_own + o_output,
        is_own,
    )
    p_conv = conv.base + source * conv.stride
    p_written = states.base + written * states.stride
    p_read = output.read + o_output
    wait_for_inputs()

    if VERIFIES:
        num_folded = streams.mixed.num_folded
        num_new = tl.load(sequences.length + i_sequence)
        first = tl.load(sequences.begin + i_sequence).to(tl.int64)
        last = num_folded + tl.minimum(num_new, 1) - 1
        for place in range(num_folded + num_new):
            tokens = _take_in(p_conv, streams, channels, place, weights, SIZES, VERIFIES)
            b_state, b_q, b_added = ADVANCE(
                b_state, tokens.vectors, streams, place, head, weights, SIZES, VERIFIES
            )
            if place >= num_folded:
                b_y = tl.sum(b_state * b_q[:, None], 0) + b_added
                tl.store(p_read + (first + place - num_folded) * WIDTH, b_y, is_own)
            b_kept = b_state.to(states.base.dtype.element_ty)
            if place == last:
                # Threads that hold the same numbers have all read them: slot_in may be slot_out.
                tl.debug_barrier()
                tl.store(p_written + o_state, b_kept, in_state)
            # What a step that ends here would find in the pool.
            b_state = b_kept.to(tl.float32)
    else:
        token = _take_in(p_conv, streams, channels, 0, weights, SIZES, VERIFIES)
        b_state, b_q, b_added = ADVANCE(
            b_state, token.vectors, streams, 0, head, weights, SIZES, VERIFIES
        )
        b_y = tl.sum(b_state * b_q[:, None], 0) + b_added
        tl.store(p_read + i_sequence * WIDTH, b_y, is_own)
        # This program has read all of its slots, and stored what the unit's norm reads.
        tl.debug_barrier()
        tl.store(p_written + o_state, b_state.to(states.base.dtype.element_ty), in_state)
        p_conv = conv.base + written * conv.stride
        keep_window(p_conv, token.window_own, channels.own, is_own, SIZES.taps)
        p_arrivals = arrivals + i_sequence * SIZES.units + i_unit
        arrived = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(0) - 1:
            tl.store(p_arrivals, 0)
            keep_window(p_conv, token.window_read, channels.read, is_s, SIZES.taps)
            keep_window(p_conv, token.window_write, channels.write, is_s, SIZES.taps)
            _finish_unit(output, weights, i_sequence, i_unit, SIZES, FINISH)


@triton.jit
def _open_streams(inputs, records, sequences, i_sequence, VERIFIES: tl.constexpr):
    return Streams(
        open_stream(inputs.mixed, records, sequences, i_sequence, VERIFIES),
        open_stream(inputs.strengths, records, sequences, i_sequence, VERIFIES),
        open_stream(inputs.decays, records, sequences, i_sequence, VERIFIES),
    )


@triton.jit
def _take_in(
    p_conv, streams, channels, place, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr
):
    """The convolution's outputs at a place, and the windows that they were made of."""
    TAPS: tl.constexpr = SIZES.taps
    mixed, is_s, is_own = streams.mixed, channels.is_shared, channels.is_own
    w_read = load_window(mixed, p_conv, channels.read, is_s, place, TAPS, VERIFIES)
    w_write = load_window(mixed, p_conv, channels.write, is_s, place, TAPS, VERIFIES)
    w_own = load_window(mixed, p_conv, channels.own, is_own, place, TAPS, VERIFIES)
    vectors = Vectors(
        convolve(w_read, weights.conv, weights.conv_bias, channels.read, is_s, TAPS),
        convolve(w_write, weights.conv, weights.conv_bias, channels.write, is_s, TAPS),
        convolve(w_own, weights.conv, weights.conv_bias, channels.own, is_own, TAPS),
    )
    return TakenToken(vectors, w_read, w_write, w_own)


@triton.jit
def _finish_unit(output, weights, token, i_unit, SIZES: tl.constexpr, FINISH: tl.constexpr):
    """Norm and gate what all programs of a unit have read for a token."""
    ROWS: tl.constexpr = triton.next_power_of_2(SIZES.norm_rows)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, triton.next_power_of_2(SIZES.norm_width))[None, :]
    is_real = (row < SIZES.norm_rows) & (column < SIZES.norm_width)
    UNIT: tl.constexpr = SIZES.norm_rows * SIZES.norm_width
    at = i_unit * UNIT + row * SIZES.norm_width + column
    b_weight = None
    if weights.norm is not None:
        o_weight = column if SIZES.norm_is_shared else at
        b_weight = tl.load(weights.norm + o_weight, column < SIZES.norm_width, 0)
    b_gate = tl.load(output.gate.base + token * output.gate.stride + at, is_real, 0)
    p_token = token * (SIZES.units * UNIT)
    b_y = tl.load(output.read + p_token + at, is_real, 0)
    squares = None
    if output.squares is not None:
        HEADS: tl.constexpr = SIZES.units * SIZES.group
        squares = _add_squares(output.squares, token * HEADS + i_unit * SIZES.group, SIZES.group)
    b_y = FINISH(b_y, b_weight, b_gate, weights.norm_eps, SIZES.norm_width, squares)
    tl.store(output.base + p_token + at, b_y.to(output.base.dtype.element_ty), is_real)


@triton.jit
def _add_squares(squares, first, HEADS: tl.constexpr):
    """The sum of squares of HEADS heads from the first on, in the order of Hopper's decode: each of
    four warps' part over all heads, then these."""
    o_w = tl.arange(0, 4)
    parts = tl.load(squares + first * 4 + o_w)
    for i_head in tl.static_range(1, HEADS):
        parts += tl.load(squares + (first + i_head) * 4 + o_w)
    total = 0.0
    for i_warp in tl.static_range(4):
        total += tl.sum(tl.where(o_w == i_warp, parts, 0.0), 0)
    return total


@triton.jit(do_not_specialize_on_alignment=["sequences"])
def _finish_kernel(
    inputs,
    weights,
    conv,
    sequences,
    records,
    output,
    SIZES: tl.constexpr,
    FINISH: tl.constexpr,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A unit of one of a sequence's new tokens, MOST at most; after all of these, COLUMNS columns
    of what the next step reads."""
    i_part, i_sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    written = tl.load(sequences.slot_out + i_sequence).to(tl.int64)
    source = tl.load(sequences.slot_in + i_sequence).to(tl.int64)
    num_new = tl.load(sequences.length + i_sequence)
    token = tl.load(sequences.begin + i_sequence).to(tl.int64) + i_part % MOST
    streams = _open_streams(inputs, records, sequences, i_sequence, True)
    mixed = streams.mixed
    wait_for_inputs()
    if written < 0:
        return
    if i_part < SIZES.units * MOST:
        if i_part % MOST < num_new:
            _finish_unit(output, weights, token, i_part // MOST, SIZES, FINISH)
        return
    column = (i_part - SIZES.units * MOST) * COLUMNS + tl.arange(0, COLUMNS)
    last = mixed.num_folded + tl.minimum(num_new, 1) - 1
    is_channel = column < SIZES.channels
    p_conv = conv.base + source * conv.stride
    window = load_window(mixed, p_conv, column, is_channel, last, SIZES.taps, True)
    # Both are read before either is written: slot_in may be slot_out.
    tl.debug_barrier()
    keep_window(conv.base + written * conv.stride, window, column, is_channel, SIZES.taps)
    record_drafts(mixed, column, is_channel, num_new)
    record_drafts(streams.strengths, column, column < SIZES.strengths, num_new)
    record_drafts(streams.decays, column, column < SIZES.decays, num_new)
