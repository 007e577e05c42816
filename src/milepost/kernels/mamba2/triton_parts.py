"""What the Triton kernels of Mamba2 share: time steps, the recurrence of decodes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import softplus
from milepost.kernels.mamba2.weights import Mamba2Weights


def sizes_of(weights: Mamba2Weights, recurrent_pool: Tensor) -> dict[str, int]:
    """The sizes of a mixer, as kernels of decodes name them."""
    _, heads, head_dim, state_size = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "GROUPS": (channels - heads * head_dim) // (2 * state_size),
        "STATE_SIZE": state_size,
        "TAPS": conv_width,
        "BLOCK_TAPS": triton.next_power_of_2(conv_width),
        "BLOCK_K": triton.next_power_of_2(state_size),
    }


@triton.jit
def time_step(inputs, bias, low, high):
    """softplus(inputs + bias) within bounds, float32; NaN stays NaN."""
    wide = softplus(inputs.to(tl.float32) + bias)
    wide = tl.maximum(wide, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(wide, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def advance(state, x, b, time_step, rate):
    """States [P, K] behind a token, float32; all but `b` [K] are [P]. Fused as Hopper's kernels
    do it, whose states are the same."""
    state = state * tl.exp(time_step * rate)[:, None]
    return tl.fma((time_step * x)[:, None], b[None, :], state)
