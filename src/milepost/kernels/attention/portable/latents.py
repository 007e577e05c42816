"""The launch before attention to latents: norms and rotates latents, and writes them to their
pages.

Legend: T tokens, H query heads, R latent_dim, P shared_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.pages import PagedKV, as_bytes
from milepost.kernels.attention.portable.prepare import store_rounded
from milepost.kernels.attention.reference import TurnedEntries
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv, check_rows, next_power_of_2

_HEADS_AT_ONCE = 8


def store_latents(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    kv: PagedKV,
    kv_rows: Tensor,
    turned: TurnedEntries | None = None,
) -> None:
    """See `reference.store_latents`. `kv_rows` [T] int64 are the rows that tokens' latents are
    written to, -1 for none."""
    size, width, heads = len(norm_weight), kv.pool.shape[-1], 0
    turn = _TurnArguments(None, 0, 0, None, None, 0)
    if turned is not None:
        cosines, sines, query = turned
        check_rows(shared_query=query, cosines=cosines, sines=sines)
        row, head, _ = query.stride()
        turn = _TurnArguments(query, row, head, cosines, sines, cosines.stride(0))
        heads = query.shape[1]
    _store_latents_kernel[(len(projected), 1 + cdiv(heads, _HEADS_AT_ONCE))](
        projected,
        norm_weight,
        kv_rows,
        as_bytes(kv.pool),
        kv.fp8_scales,
        turn,
        eps,
        projected.stride(0),
        LATENT=size,
        SHARED=width - size,
        HEADS=heads,
        AT_ONCE=_HEADS_AT_ONCE,
        BLOCK_R=next_power_of_2(size),
        BLOCK_P=next_power_of_2(max(2, width - size)),
        NATIVE=kv.is_fp8 and probe(projected.device).has_fp8,
        num_warps=1,
        **OVERLAPPED,
    )


class _TurnArguments(NamedTuple):
    """`TurnedEntries` as kernel arguments; None and zeros if nothing is turned."""

    query: Any
    token_stride: Any
    head_stride: Any
    cosines: Any
    sines: Any
    angle_stride: Any


@quick
@triton.jit
def _store_latents_kernel(
    projected,
    norm_weight,
    kv_rows,
    pool,
    kv_scale,
    turn,
    eps,
    stride,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Stores one token's latent, or turns AT_ONCE of its query heads."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    first = (tl.program_id(1) - 1) * AT_ONCE
    o_r = tl.arange(0, BLOCK_R)
    is_r = o_r < LATENT
    b_weight = tl.load(norm_weight + o_r, is_r, 0)
    wait_for_inputs()
    if HEADS:  # noqa: SIM102
        if first >= 0:
            _turn_heads(turn, token, first, HEADS, SHARED, AT_ONCE, BLOCK_P)
            return
    row = tl.load(kv_rows + token)
    if row < 0:
        return
    p_token, p_row = projected + token * stride, pool + row * (LATENT + SHARED)
    dtype: tl.constexpr = projected.dtype.element_ty
    b_r = tl.load(p_token + o_r, is_r, 0).to(tl.float32)
    b_r = b_r * tl.rsqrt(tl.sum(b_r * b_r) / LATENT + eps) * b_weight
    store_rounded(p_row + o_r, b_r.to(dtype), is_r, kv_scale, NATIVE)
    if HEADS:
        o_a = tl.arange(0, BLOCK_P // 2)
        is_a, p_pair = o_a < SHARED // 2, LATENT + 2 * o_a
        b_x, b_y = _turn_pairs(turn, token, p_token + p_pair, o_a, is_a, is_a)
        store_rounded(p_row + p_pair, b_x.to(dtype), is_a, kv_scale, NATIVE)
        store_rounded(p_row + p_pair + 1, b_y.to(dtype), is_a, kv_scale, NATIVE)
    else:
        o_p = LATENT + tl.arange(0, BLOCK_P)
        is_p = o_p < LATENT + SHARED
        store_rounded(p_row + o_p, tl.load(p_token + o_p, is_p, 0), is_p, kv_scale, NATIVE)


@triton.jit
def _turn_heads(
    turn,
    token,
    first,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Turns the shared entries of some query heads in place."""
    head, o_a = first + tl.arange(0, AT_ONCE)[:, None], tl.arange(0, BLOCK_P // 2)[None, :]
    is_a = o_a < SHARED // 2
    is_pair = (head < HEADS) & is_a
    pairs = turn.query + token * turn.token_stride + head * turn.head_stride + 2 * o_a
    b_x, b_y = _turn_pairs(turn, token, pairs, o_a, is_a, is_pair)
    tl.store(pairs, b_x.to(turn.query.dtype.element_ty), is_pair)
    tl.store(pairs + 1, b_y.to(turn.query.dtype.element_ty), is_pair)


@triton.jit
def _turn_pairs(turn, token, pairs, o_a, is_a, is_pair):
    """Returns the turned numbers at `pairs`, and those next to them, float32."""
    at = token * turn.angle_stride + o_a
    b_cosine = tl.load(turn.cosines + at, is_a, 0).to(tl.float32)
    b_sine = tl.load(turn.sines + at, is_a, 0).to(tl.float32)
    b_x = tl.load(pairs, is_pair, 0).to(tl.float32)
    b_y = tl.load(pairs + 1, is_pair, 0).to(tl.float32)
    return b_x * b_cosine - b_y * b_sine, b_y * b_cosine + b_x * b_sine
