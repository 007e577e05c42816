"""What the Triton kernels of Mamba2 share: time steps, the recurrence of decodes."""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.activations import softplus


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
