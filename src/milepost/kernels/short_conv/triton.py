"""Gated short convolutions on a GPU, in two launches: outputs, then the states that are written,
for other programs of the first one read what the second one may overwrite.

Legend: T tokens, C channels, J taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.short_conv.items import ShortConvItems

_ROWS, _BLOCK = 16, 128
"""Tokens and channels of a program."""


def mix(
    projected: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, items: ShortConvItems
) -> Tensor:
    """See `short_conv.mix`."""
    num_tokens, (channels, taps) = len(projected), weight.shape
    output = torch.empty(num_tokens, channels, dtype=projected.dtype, device=projected.device)
    rows = min(_ROWS, triton.next_power_of_2(num_tokens))
    blocks = triton.cdiv(channels, _BLOCK)
    sizes = {"CHANNELS": channels, "TAPS": taps, "BLOCK": _BLOCK}
    common = projected, projected.stride(0)
    states = pool, items.sequence_begin, items.sequence_row
    _mix_kernel[(blocks, triton.cdiv(num_tokens, rows))](
        *common,
        weight,
        bias,
        *states,
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
]
"""Arrays that begin anywhere in a buffer."""


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_UNSPECIALISED)
def _mix_kernel(
    projected,
    stride,
    weight,
    bias,
    pool,
    sequence_begin,
    sequence_row,
    token_sequence,
    output,
    num_tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens of BLOCK channels."""
    let_next_start()
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_c, is_token = o_c < CHANNELS, o_t < num_tokens
    sequence = tl.load(token_sequence + o_t, is_token, -1)
    is_real = sequence >= 0
    begin = tl.load(sequence_begin + sequence, is_real, 0)
    row = tl.load(sequence_row + sequence, is_real, 0).to(tl.int64)
    wait_for_inputs()
    inside = is_real[:, None] & is_c[None, :]
    dtype: tl.constexpr = output.dtype.element_ty
    x = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        x += tl.load(bias + o_c, is_c, 0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        source = o_t - (TAPS - 1) + tap
        inputs = _inputs(
            projected, stride, pool, row, begin, source, o_c, inside, CHANNELS, TAPS, dtype
        )
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
    pool,
    row,
    begin,
    source,
    o_c,
    inside,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    dtype: tl.constexpr,
):
    """What the convolution reads at tokens `source`, [tokens, channels]: of the step, or from the
    state before it."""
    is_new = inside & (source >= begin)[:, None]
    p_token = projected + source.to(tl.int64)[:, None] * stride + o_c[None, :]
    b_before = tl.load(p_token, is_new, 0).to(tl.float32)
    b_x = tl.load(p_token + 2 * CHANNELS, is_new, 0).to(tl.float32)
    kept = row * (CHANNELS * (TAPS - 1)) + source - begin + TAPS - 1
    p_old = pool + kept[:, None] + o_c[None, :] * (TAPS - 1)
    b_old = tl.load(p_old, inside & (source < begin)[:, None], 0)
    return tl.where(is_new, (b_before * b_x).to(dtype), b_old.to(dtype))


@triton.jit(do_not_specialize_on_alignment=_UNSPECIALISED)
def _keep_kernel(
    projected,
    stride,
    pool,
    sequence_begin,
    sequence_row,
    sequence_place,
    place_end,
    place_row,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """BLOCK channels of all states that a sequence leaves."""
    let_next_start()
    i_s = tl.program_id(1)
    first, last = tl.load(sequence_place + i_s), tl.load(sequence_place + i_s + 1)
    begin = tl.load(sequence_begin + i_s)
    row = tl.load(sequence_row + i_s).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_tap = tl.arange(0, BLOCK_TAPS)
    inside = (o_tap < TAPS - 1)[:, None] & (o_c < CHANNELS)[None, :]
    dtype: tl.constexpr = pool.dtype.element_ty
    # Before the launch ahead has ended, its programs may read what is written here.
    wait_for_inputs()
    for place in range(first, last):
        source = tl.load(place_end + place) - (TAPS - 1) + o_tap
        b_state = _inputs(
            projected, stride, pool, row, begin, source, o_c, inside, CHANNELS, TAPS, dtype
        )
        tl.debug_barrier()
        written = tl.load(place_row + place).to(tl.int64) * (CHANNELS * (TAPS - 1))
        p_state = pool + written + o_tap[:, None] + o_c[None, :] * (TAPS - 1)
        tl.store(p_state, b_state, inside)
