"""What comes before latent attention, in one launch: the latents' norm, and latents to their rows.

Legend: T tokens, R latent_dim, P shared_dim, E = R + P.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.pages import as_bytes
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import encode
from milepost.kernels.platform.tensors import FP8


def store(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    pool: Tensor,
    kv_rows: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """As `reference.store`; `kv_rows` [T] int64 say where each token's latent goes, -1 for
    nowhere."""
    size, width = len(norm_weight), pool.shape[-1]
    is_float8 = pool.dtype == FP8
    _store_kernel[(len(projected),)](
        projected,
        norm_weight,
        kv_rows,
        as_bytes(pool),
        kv_scale if is_float8 else None,
        eps,
        projected.stride(0),
        LATENT=size,
        SHARED=width - size,
        BLOCK_R=triton.next_power_of_2(size),
        BLOCK_P=triton.next_power_of_2(max(1, width - size)),
        NATIVE=is_float8 and probe(projected.device).has_fp8,
        num_warps=1,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _store_kernel(
    projected,
    norm_weight,
    kv_rows,
    pool,
    kv_scale,
    eps,
    stride,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One token."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_r, o_p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    is_r, is_p = o_r < LATENT, o_p < SHARED
    b_weight = tl.load(norm_weight + o_r, is_r, 0)
    wait_for_inputs()
    row = tl.load(kv_rows + token)
    if row < 0:
        return
    p_token = projected + token * stride
    b_r = tl.load(p_token + o_r, is_r, 0).to(tl.float32)
    b_p = tl.load(p_token + LATENT + o_p, is_p, 0)
    b_r = b_r * tl.rsqrt(tl.sum(b_r * b_r) / LATENT + eps) * b_weight
    b_r = b_r.to(b_p.dtype)
    p_row = pool + row * (LATENT + SHARED)
    if kv_scale is None:
        tl.store(p_row + o_r, b_r, is_r)
        tl.store(p_row + LATENT + o_p, b_p, is_p)
    else:
        scale = tl.load(kv_scale)
        tl.store(p_row + o_r, encode(tl.div_rn(b_r.to(tl.float32), scale), NATIVE), is_r)
        scaled = tl.div_rn(b_p.to(tl.float32), scale)
        tl.store(p_row + LATENT + o_p, encode(scaled, NATIVE), is_p)
