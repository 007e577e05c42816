"""SSD in three launches: time steps and decays; states from chunk to chunk; and what is read from
these and from the chunks' own tokens.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, P head_dim, G groups, S state_size; I = H
* P and WIDTH = I + 2 * G * S channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import LOG2_E, softplus
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.portable.chunk_h import export_state, load_state, store_state
from milepost.kernels.recurrent.structures import Mixer, PrefillChunks, SlotStates

_HEADS = 8
"""Heads of a program that computes time steps."""
_ROWS = 64
"""Tokens of a program that makes outputs, and the widest tiles in float32."""
_MOST_HEADS = 8
"""Largest number of heads of a program that makes outputs."""
_COLUMNS = 32
"""State columns of a program; twice as many in float32."""
_WARPS, _STAGES = 4, 3


class SSDTensors(NamedTuple):
    """Intermediate tensors of Mamba2's prefill. Time steps and decays are float32."""

    mixed: Any
    """[T, WIDTH], x, B and C after the convolution."""
    steps: Any
    """[H, T]"""
    sums: Any
    """[H, T], log2 decays added up from the chunk's begin."""
    to_end: Any
    """[H, T], time steps times the decay up to the chunk's end."""
    decays: Any
    """[N, H], of whole chunks."""
    h: Any
    """[N, H, P, S], the states before chunks."""


def discretise(mixer: Mixer, mixed: Tensor, chunks: PrefillChunks, chunk: int) -> SSDTensors:
    """Returns the prefill's tensors: time steps and decays are filled, states are not."""
    sizes, num_chunks = mixer.sizes, len(chunks.size)
    of_tokens = mixed.new_empty(3, sizes.heads, len(mixed), dtype=torch.float32)
    decays = mixed.new_empty(num_chunks, sizes.heads, dtype=torch.float32)
    h = mixed.new_empty(num_chunks, sizes.heads, sizes.own, sizes.shared)
    steps, sums, to_end = of_tokens.unbind()
    tensors = SSDTensors(mixed, steps, sums, to_end, decays, h)
    operands = mixer.inputs.strengths, len(mixed), mixer.weights, chunks, tensors
    options = {"num_warps": 4, **OVERLAPPED}
    grid = triton.cdiv(sizes.heads, _HEADS), num_chunks
    _discretise_kernel[grid](*operands, SIZES=sizes, C=chunk, BLOCK=_HEADS, **options)
    return tensors


def chunk_fwd_h(
    mixer: Mixer, chunk: int, pool: SlotStates, chunks: PrefillChunks, tensors: SSDTensors
) -> None:
    """Writes the states before every chunk to `tensors.h`, exports and final states to `pool`."""
    sizes, is_wide = mixer.sizes, tensors.mixed.dtype == torch.float32
    columns = _COLUMNS * (1 + is_wide)
    grid = triton.cdiv(sizes.shared, columns), sizes.heads, len(chunks.slot_out)
    operands = len(tensors.mixed), chunks, pool, tensors
    options = {"num_warps": _WARPS * (1 + is_wide), "num_stages": _STAGES, **OVERLAPPED}
    _chunk_fwd_h_kernel[grid](*operands, SIZES=sizes, C=chunk, BLOCK_S=columns, **options)


def chunk_fwd_o(mixer: Mixer, chunk: int, chunks: PrefillChunks, tensors: SSDTensors) -> Tensor:
    """Returns outputs before gates and norm [T, I]."""
    sizes, mixed = mixer.sizes, tensors.mixed
    is_wide = mixed.dtype == torch.float32
    y: Tensor = mixed.new_empty(len(mixed), sizes.width)
    num_tiles = len(tensors.h) * triton.cdiv(chunk, _ROWS)
    each = _choose_heads(sizes, num_tiles, num_sms(mixed.device))
    columns = _ROWS if is_wide else max(_ROWS, chunk)
    operands = len(mixed), mixer.weights, chunks, tensors, y
    constants = {"SIZES": sizes, "C": chunk, "ROWS": _ROWS, "COLUMNS": columns, "EACH": each}
    options = {"num_warps": 4, "num_stages": 1 + is_wide, **OVERLAPPED}
    _chunk_fwd_o_kernel[sizes.heads // each, num_tiles](*operands, **constants, **options)
    return y


def _choose_heads(sizes: MixerSizes, num_tiles: int, num_sms: int) -> int:
    """Returns the number of heads of a program: as many as leave two programs per SM."""
    each = _MOST_HEADS
    while sizes.group % each or (each > 1 and sizes.heads // each * num_tiles < 2 * num_sms):
        each //= 2
    return each


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _discretise_kernel(
    inputs,
    num_tokens,
    weights,
    chunks,
    tensors,
    SIZES: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes time steps and log2 decays of some heads of a chunk."""
    launch_dependents()
    i_t = tl.program_id(1)
    size = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if size <= 0:
        return
    token = tl.load(chunks.begin + i_t).to(tl.int64) + tl.arange(0, C)
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_head = head < SIZES.heads
    is_real = (tl.arange(0, C) < size)[:, None] & is_head[None, :]
    b_in = tl.load(inputs.base + token[:, None] * inputs.stride + head[None, :], is_real, 0)
    bias = tl.load(weights.dt_bias + head, is_head, 0)[None, :]
    b_steps = tl.where(is_real, time_step(b_in, bias, weights.dt_limit), 0)
    b_rate = tl.load(weights.rate + head, is_head, 0) * LOG2_E
    b_sums = tl.cumsum(b_steps * b_rate[None, :], 0)
    at = head.to(tl.int64)[None, :] * num_tokens + token[:, None]
    tl.store(tensors.steps + at, b_steps, is_real)
    tl.store(tensors.sums + at, b_sums, is_real)
    # Tokens past the chunk's end decay nothing.
    total = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], b_sums, 0), 0)
    tl.store(tensors.to_end + at, b_steps * tl.exp2(total[None, :] - b_sums), is_real)
    tl.store(tensors.decays + i_t * SIZES.heads + head, tl.exp2(total), is_head)


@triton.jit
def time_step(inputs, bias, limit):
    """Returns softplus(inputs + bias) within `limit`, float32; NaN stays NaN."""
    low, high = limit
    wide = tl.maximum(
        softplus(inputs.to(tl.float32) + bias), low, propagate_nan=tl.PropagateNan.ALL
    )
    return tl.minimum(wide, high, propagate_nan=tl.PropagateNan.ALL)


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _chunk_fwd_h_kernel(
    num_tokens, chunks, pool, tensors, SIZES: tl.constexpr, C: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Takes BLOCK_S columns of a head's state through all chunks of a sequence."""
    STATE_SIZE: tl.constexpr = SIZES.shared
    HEAD_DIM: tl.constexpr = SIZES.own
    WIDTH: tl.constexpr = SIZES.channels
    i_s, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents()
    first, last = tl.load(chunks.first + i_n), tl.load(chunks.first + i_n + 1)
    if first == last:
        wait_for_inputs()
        return
    o_t, o_p = tl.arange(0, C), tl.arange(0, SIZES.own_tile)
    o_s = i_s * BLOCK_S + tl.arange(0, BLOCK_S)
    is_p, is_s = o_p < HEAD_DIM, o_s < STATE_SIZE
    in_h = is_p[:, None] & is_s[None, :]
    o_h = (i_h * HEAD_DIM + o_p[:, None]) * STATE_SIZE + o_s[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_h = load_state(pool, chunks, i_n, o_h, in_h)
    wait_for_inputs()
    p_x = tensors.mixed + i_h * HEAD_DIM + o_t[:, None] * WIDTH + o_p[None, :]
    p_b = tensors.mixed + SIZES.width + i_h // SIZES.group * STATE_SIZE
    p_b += o_t[:, None] * WIDTH + o_s[None, :]
    head_begin = i_h.to(tl.int64) * num_tokens

    # Loaded a chunk ahead, as in `chunk_h`.
    begin, size = tl.load(chunks.begin + first), tl.load(chunks.size + first)
    slot, decay = (
        tl.load(chunks.export + first),
        tl.load(tensors.decays + first * SIZES.heads + i_h),
    )
    for i_t in range(first, last):
        in_chunk, at = o_t < size, begin.to(tl.int64) * WIDTH
        b_x = tl.load(p_x + at, in_chunk[:, None] & is_p[None, :], 0)
        b_b = tl.load(p_b + at, in_chunk[:, None] & is_s[None, :], 0)
        b_step = tl.load(tensors.to_end + head_begin + begin + o_t, in_chunk, 0)
        following = tl.minimum(i_t + 1, last - 1)
        begin, size = tl.load(chunks.begin + following), tl.load(chunks.size + following)
        next_slot = tl.load(chunks.export + following)
        next_decay = tl.load(tensors.decays + following * SIZES.heads + i_h)
        p_h = tensors.h + tl.cast(i_t, tl.int64) * (SIZES.width * STATE_SIZE) + o_h
        tl.store(p_h, b_h.to(tensors.h.dtype.element_ty), in_h)
        b_x = (b_x.to(tl.float32) * b_step[:, None]).to(b_b.dtype)
        b_h *= decay
        b_h += tl.dot(tl.trans(b_x), b_b, input_precision="ieee")
        export_state(pool, slot, o_h, in_h, b_h)
        slot, decay = next_slot, next_decay

    store_state(pool, chunks, i_n, o_h, in_h, b_h)


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _chunk_fwd_o_kernel(
    num_tokens,
    weights,
    chunks,
    tensors,
    y,
    SIZES: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Computes `y` [T, I] for ROWS tokens of EACH heads of a group and chunk: what C reads of the
    state before the chunk and of the chunk's tokens, COLUMNS at a time, plus D * x. Products of C
    and B are the group's; the number of heads that share them changes no bit."""
    STATE_SIZE: tl.constexpr = SIZES.shared
    HEAD_DIM: tl.constexpr = SIZES.own
    WIDTH: tl.constexpr = SIZES.channels
    first = tl.program_id(0) * EACH
    PARTS: tl.constexpr = (C + ROWS - 1) // ROWS
    i_t, i_part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    size = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if i_part * ROWS >= size:
        return
    begin = tl.load(chunks.begin + i_t).to(tl.int64)
    o_p, o_s = tl.arange(0, SIZES.own_tile), tl.arange(0, SIZES.shared_tile)
    is_p, is_s = o_p < HEAD_DIM, o_s < STATE_SIZE
    p_b = tensors.mixed + begin * WIDTH + SIZES.width + first // SIZES.group * STATE_SIZE
    p_b += o_s[None, :]
    i_row, column = i_part * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    # Tokens after these rows are not read.
    is_row, stop = i_row < size, tl.minimum(size, (i_part + 1) * ROWS)
    p_c = p_b + SIZES.units * STATE_SIZE + i_row[:, None] * WIDTH
    b_c = tl.load(p_c, is_row[:, None] & is_s[None, :], 0)
    whole = _scores(b_c, p_b, i_row, column, stop, is_s, WIDTH) if COLUMNS >= C else 0.0
    for i_h in range(first, first + EACH):
        head_begin = tl.cast(i_h, tl.int64) * num_tokens + begin
        b_sums = tl.load(tensors.sums + head_begin + i_row, is_row, 0)
        p_h = tensors.h + (i_t.to(tl.int64) * SIZES.heads + i_h) * (HEAD_DIM * STATE_SIZE)
        p_h += o_p[:, None] * STATE_SIZE + o_s[None, :]
        b_h = tl.load(p_h, is_p[:, None] & is_s[None, :], 0)
        p_x = tensors.mixed + begin * WIDTH + i_h * HEAD_DIM + o_p[None, :]
        p_steps, p_sums = tensors.steps + head_begin, tensors.sums + head_begin
        b_y = tl.dot(b_c, tl.trans(b_h), input_precision="ieee") * tl.exp2(b_sums)[:, None]
        of_tokens = b_sums, p_x, p_steps, p_sums
        if COLUMNS >= C:
            b_y = _read_tokens(b_y, whole, *of_tokens, column, stop, is_p, WIDTH)
        else:
            for part in range(i_part * ROWS // COLUMNS + 1):
                j_row = part * COLUMNS + column
                scores = _scores(b_c, p_b, i_row, j_row, stop, is_s, WIDTH)
                b_y = _read_tokens(b_y, scores, *of_tokens, j_row, stop, is_p, WIDTH)
        in_y = is_row[:, None] & is_p[None, :]
        b_own = tl.load(p_x + i_row[:, None] * WIDTH, in_y, 0)
        b_y += tl.load(weights.skip + i_h) * b_own.to(tl.float32)
        p_y = y + (begin + i_row[:, None]) * (SIZES.width) + i_h * HEAD_DIM + o_p[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), in_y)


@triton.jit
def _scores(b_c, p_b, i_row, j_row, stop, is_s, WIDTH: tl.constexpr):
    """Multiplies C by B transposed, [ROWS, COLUMNS]; zero for later tokens."""
    in_b = (j_row < stop)[:, None] & is_s[None, :]
    b_b = tl.load(p_b + j_row[:, None] * WIDTH, in_b, 0)
    scores = tl.dot(b_c, tl.trans(b_b), input_precision="ieee")
    return tl.where(i_row[:, None] >= j_row[None, :], scores, 0)


@triton.jit
def _read_tokens(b_y, scores, b_sums, p_x, p_steps, p_sums, j_row, stop, is_p, WIDTH: tl.constexpr):
    """Adds to `b_y` [ROWS, P] what it reads of some tokens of a head."""
    is_token = j_row < stop
    b_x = tl.load(p_x + j_row[:, None] * WIDTH, is_token[:, None] & is_p[None, :], 0)
    sums = tl.load(p_sums + j_row, is_token, 0)
    step = tl.load(p_steps + j_row, is_token, 0)
    # Clamped, since for later tokens, whose scores are zero, it may overflow.
    decay = tl.minimum(b_sums[:, None] - sums[None, :], 0, propagate_nan=tl.PropagateNan.ALL)
    weight = scores * (tl.exp2(decay) * step[None, :])
    return tl.dot(weight.to(b_x.dtype), b_x, b_y, input_precision="ieee")
