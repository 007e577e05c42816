"""Mamba2's token mixer for many tokens a sequence, in five launches.

1. `convolve`: some channels of a tile in each program; x, B and C.
2. `discretise`: some heads of a chunk; time steps and decays.
3. `chunk_fwd_h`: a head's state, from chunk to chunk of a sequence, in float32; leaves the state
   before every chunk, writes exports and final states. (Mamba2's chunk states and their passing at
   once: what each chunk adds is never written.)
4. `chunk_fwd_o`: some heads of a group and chunk; outputs from states and tokens (its chunk scan).
5. `norm`: a group of some tokens.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.

Legend: T tokens, S sequences, L tiles, N chunks, H heads, P head_dim, G groups, K state_size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from milepost.kernels.layout.chunks import TILE, ChunkLayout
from milepost.kernels.mamba2.triton_inputs import convolve, discretise
from milepost.kernels.mamba2.triton_norm import norm
from milepost.kernels.mamba2.triton_states import chunk_fwd_h_kernel, chunk_fwd_o_kernel
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import OVERLAPPED

_CONVOLVED_ROWS = 16
"""Rows of a tile in one program of `convolve`, no fewer than taps."""
_CONVOLVED_BATCH = 8
"""Of them are loaded at a time."""
_CONVOLVED_CHANNELS = 512
_HEADS = 8
"""Of a program of `discretise`."""
_ROWS = 64
"""Tiles of products are no narrower, as in Gated DeltaNet; in `chunk_fwd_o` they are no taller, and
of float32 no wider."""
_O_HEADS = 8
"""Heads of a program of `chunk_fwd_o`, at most."""
_H_COLUMNS = 32
"""Columns of the state in one program of `chunk_fwd_h`; twice as many of float32."""
_NORMED = 4096
"""Entries in one program of `norm`."""
_CONVOLVE = {"num_warps": 4}
_DISCRETISE = {"num_warps": 4}
_H_WARPS, _H_STAGES = 4, 3
_O_WARPS = 4
_NORM = {"num_warps": 4}


def prefill(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkLayout,
) -> Tensor:
    """See `mamba2.mix`."""
    _, heads, head_dim, _ = recurrent_pool.shape
    inner = heads * head_dim
    slots = slot_in, slot_out
    mixed = _convolve(projected[:, inner:], weights, conv_pool, slots, layout)
    y = scan(mixed, projected[:, -heads:], weights, recurrent_pool, slots, layout)
    return _norm(y, projected, weights, recurrent_pool, layout)


def scan(
    mixed: Tensor,
    inputs: Tensor,
    weights: Mamba2Weights,
    pool: Tensor,
    slots: tuple[Tensor, Tensor],
    layout: ChunkLayout,
) -> Tensor:
    """The recurrence alone, of convolved x, B and C [T, channels] and what time steps are made of
    [T, H]; returns outputs before gates and norm [T, H * P], and writes `pool`."""
    times = _discretise(inputs, weights, layout)
    states = _chunk_fwd_h(mixed, times, pool, slots, layout)
    return _chunk_fwd_o(mixed, times, states, weights.skip, layout)


class _Times(NamedTuple):
    """What `discretise` makes of time steps, float32."""

    steps: Tensor
    """[H, T]."""
    sums: Tensor
    """[H, T], logarithms of decays, of base 2, added up from a chunk's begin."""
    to_end: Tensor
    """[H, T], steps decayed up to a chunk's end."""
    decays: Tensor
    """[N, H], of whole chunks."""


def _convolve(
    projected: Tensor,
    weights: Mamba2Weights,
    pool: Tensor,
    slots: tuple[Tensor, Tensor],
    layout: ChunkLayout,
) -> Tensor:
    """x, B and C, [T, channels]; writes `pool`."""
    channels, conv_width = weights.conv.shape
    mixed = projected.new_empty(len(projected), channels)
    parts = TILE // _CONVOLVED_ROWS
    grid = triton.cdiv(channels, _CONVOLVED_CHANNELS), len(layout.tile_sequence) * parts
    convolve[grid](
        projected,
        projected.stride(0),
        weights.conv,
        weights.conv_bias,
        pool,
        pool.stride(0),
        *slots,
        layout.sequence_begin,
        layout.tile_sequence,
        layout.tile_begin,
        layout.tile_export,
        layout.export_end,
        layout.export_slot,
        mixed,
        CHANNELS=channels,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        BLOCK=_CONVOLVED_CHANNELS,
        ROWS=_CONVOLVED_ROWS,
        BATCH=_CONVOLVED_BATCH,
        PARTS=parts,
        **_CONVOLVE,
        **OVERLAPPED,
    )
    return mixed


def _discretise(inputs: Tensor, weights: Mamba2Weights, layout: ChunkLayout) -> _Times:
    num_tokens, heads = inputs.shape
    steps, sums, to_end = inputs.new_empty(3, heads, num_tokens, dtype=torch.float32)
    decays = inputs.new_empty(len(layout.chunk_size), heads, dtype=torch.float32)
    discretise[triton.cdiv(heads, _HEADS), len(layout.chunk_size)](
        inputs,
        inputs.stride(0),
        num_tokens,
        weights.rate,
        weights.dt_bias,
        *weights.dt_limit,
        layout.chunk_begin,
        layout.chunk_size,
        steps,
        sums,
        to_end,
        decays,
        HEADS=heads,
        C=layout.chunk,
        BLOCK=_HEADS,
        **_DISCRETISE,
        **OVERLAPPED,
    )
    return _Times(steps, sums, to_end, decays)


def _sizes(mixed: Tensor, heads: int, head_dim: int, state_size: int) -> dict[str, int]:
    """As the kernels that go through chunks name them."""
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "GROUPS": (mixed.shape[1] - heads * head_dim) // (2 * state_size),
        "STATE_SIZE": state_size,
        "BLOCK_P": max(_ROWS, triton.next_power_of_2(head_dim)),
    }


def _chunk_fwd_h(
    mixed: Tensor,
    times: _Times,
    pool: Tensor,
    slots: tuple[Tensor, Tensor],
    layout: ChunkLayout,
) -> Tensor:
    """States before chunks, [N, H, P, K]; writes `pool`."""
    _, heads, head_dim, state_size = pool.shape
    states = mixed.new_empty(len(layout.chunk_size), heads, head_dim, state_size)
    is_wide = mixed.dtype == torch.float32
    columns = _H_COLUMNS * (1 + is_wide)
    chunk_fwd_h_kernel[triton.cdiv(state_size, columns), heads, len(slots[0])](
        len(mixed),
        layout.sequence_chunk,
        layout.chunk_begin,
        layout.chunk_size,
        layout.chunk_slot,
        *slots,
        pool,
        pool.stride(0),
        mixed,
        times.to_end,
        times.decays,
        states,
        **_sizes(mixed, heads, head_dim, state_size),
        C=layout.chunk,
        BLOCK_K=columns,
        num_warps=_H_WARPS * (1 + is_wide),
        num_stages=_H_STAGES,
        **OVERLAPPED,
    )
    return states


def _chunk_fwd_o(
    mixed: Tensor, times: _Times, states: Tensor, skip: Tensor, layout: ChunkLayout
) -> Tensor:
    """Outputs before gates and norm, [T, H * P]."""
    num_chunks, heads, head_dim, state_size = states.shape
    y = mixed.new_empty(len(mixed), heads * head_dim)
    sizes = _sizes(mixed, heads, head_dim, state_size)
    is_wide = mixed.dtype == torch.float32
    num_tiles = num_chunks * triton.cdiv(layout.chunk, _ROWS)
    each = _choose_heads(heads, sizes["GROUPS"], num_tiles, num_sms(mixed.device))
    chunk_fwd_o_kernel[heads // each, num_tiles](
        len(mixed),
        skip,
        layout.chunk_begin,
        layout.chunk_size,
        mixed,
        times.steps,
        times.sums,
        states,
        y,
        **sizes,
        C=layout.chunk,
        ROWS=_ROWS,
        COLUMNS=_ROWS if is_wide else max(_ROWS, layout.chunk),
        EACH=each,
        BLOCK_K=max(_ROWS, triton.next_power_of_2(state_size)),
        num_warps=_O_WARPS,
        num_stages=1 + is_wide,
        **OVERLAPPED,
    )
    return y


def _choose_heads(heads: int, groups: int, num_tiles: int, num_sms: int) -> int:
    """Heads of a program of `chunk_fwd_o`: as many as leave two programs for each SM."""
    each = _O_HEADS
    while heads // groups % each or (each > 1 and heads // each * num_tiles < 2 * num_sms):
        each //= 2
    return each


def _norm(
    y: Tensor,
    projected: Tensor,
    weights: Mamba2Weights,
    pool: Tensor,
    layout: ChunkLayout,
) -> Tensor:
    num_tokens, inner = y.shape
    groups = (len(weights.conv) - inner) // (2 * pool.shape[-1])
    block = triton.next_power_of_2(inner // groups)
    rows = max(1, _NORMED // block)
    output = torch.empty_like(y)
    norm[groups, triton.cdiv(num_tokens, rows)](
        y,
        projected,
        projected.stride(0),
        num_tokens,
        layout.sequence_begin,
        len(layout.sequence_begin) - 1,
        weights.norm,
        weights.norm_eps,
        output,
        GROUPS=groups,
        W=inner // groups,
        BEFORE_GATE=weights.norm_before_gate,
        ROWS=rows,
        BLOCK=block,
        **_NORM,
        **OVERLAPPED,
    )
    return output
