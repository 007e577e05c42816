"""What the Triton kernels of KDA share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid, softplus
from milepost.kernels.kda.weights import KDAWeights


def sizes_of(weights: KDAWeights, recurrent_pool: Tensor) -> dict[str, int]:
    """The sizes of a mixer, as kernels of decodes name them."""
    _, heads, head_dim, _ = recurrent_pool.shape
    conv_width = weights.conv.shape[1]
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "TAPS": conv_width,
        "BLOCK_TAPS": triton.next_power_of_2(conv_width),
        "BLOCK": triton.next_power_of_2(head_dim),
    }


@triton.jit
def gated_norm(x, weight, gate, eps, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """RMS norm of `x` over `AXIS` (SIZE entries, zeros beyond), times the sigmoid of `gate`."""
    scale = tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) / SIZE + eps)
    return x * scale * weight * sigmoid(gate)


@triton.jit
def unit(query, key, HEAD_DIM: tl.constexpr):
    """A unit key, and a query shorter than that by HEAD_DIM ** -0.5."""
    query *= tl.rsqrt(tl.sum(query * query) + 1e-6) * HEAD_DIM**-0.5
    key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
    return query, key


@triton.jit
def channel_decay(rate, bias, inputs):
    """exp(rate * softplus(inputs + bias)), float32."""
    return tl.exp(rate * softplus(inputs.to(tl.float32) + bias))


@triton.jit
def finish_head(y, gate, output, norm_weight, eps, o_k, is_k, o_key, HEAD_DIM: tl.constexpr):
    """Norm what all programs of a head have read of a token, and gate it."""
    b_o = tl.load(y + o_key, is_k, 0)
    b_norm = tl.load(norm_weight + o_k, is_k, 0)
    b_gate = tl.load(gate + o_key, is_k, 0)
    b_o = gated_norm(b_o, b_norm, b_gate, eps, HEAD_DIM, 0)
    tl.store(output + o_key, b_o.to(output.dtype.element_ty), is_k)
