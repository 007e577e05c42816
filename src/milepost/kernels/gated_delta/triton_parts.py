"""What the Triton kernels of Gated DeltaNet share: gates, norms, heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import silu, softplus
from milepost.kernels.gated_delta.weights import GatedDeltaWeights


def sizes_of(weights: GatedDeltaWeights, recurrent_pool: Tensor) -> dict[str, int]:
    """The sizes of a mixer, as kernels of decodes name them."""
    _, value_heads, key_dim, value_dim = recurrent_pool.shape
    key_heads = (len(weights.conv) - value_heads * value_dim) // (2 * key_dim)
    return {"KEY_HEADS": key_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}


@triton.jit
def log_decay(rate, bias, inputs):
    """rate * softplus(inputs + bias), float32."""
    return rate * softplus(inputs.to(tl.float32) + bias)


@triton.jit
def advance(state, key, value, beta, decay):
    """The state [K, W] behind a token, float32."""
    state = state * decay
    change = (value - tl.sum(state * key[:, None], 0)) * beta
    return state + key[:, None] * change[None, :]


@triton.jit
def gated_norm(x, weight, gate, eps, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """RMS norm of `x` over `AXIS` (SIZE entries, zeros beyond), times silu of `gate`."""
    scale = tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) / SIZE + eps)
    return x * scale * weight * silu(gate.to(tl.float32))


@triton.jit
def head_channels(head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """First channel and number of channels of a head: query heads, key heads, then value heads."""
    size = tl.where(head < 2 * KEY_HEADS, KEY_DIM, VALUE_DIM)
    first = tl.minimum(head, 2 * KEY_HEADS) * KEY_DIM
    return first + tl.maximum(head - 2 * KEY_HEADS, 0) * VALUE_DIM, size


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
