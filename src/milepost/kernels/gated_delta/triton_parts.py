"""Parts that the prefill kernels of Gated DeltaNet share."""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import softplus


@triton.jit
def log_decay(rate, bias, inputs):
    """rate * softplus(inputs + bias), float32."""
    return rate * softplus(inputs.to(tl.float32) + bias)


@triton.jit
def unit_scale(x, head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, AXIS: tl.constexpr):
    """What makes `x` a unit vector over `AXIS` if `head` is a key's; a query's is shorter by
    KEY_DIM ** -0.5; a value stays as it is."""
    scale = tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + 1e-6)
    scale *= tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    return tl.where(head < 2 * KEY_HEADS, scale, 1.0)


@triton.jit
def pairwise_decay(decay, row, BELOW: tl.constexpr):
    """[C, C], decay from token j to token i where i >= j + BELOW, else 0."""
    is_later = row[:, None] >= row[None, :] + BELOW
    between = tl.where(is_later, decay[:, None] - decay[None, :], 0)
    return tl.where(is_later, tl.exp(between), 0)
