"""What the Triton kernels of KDA share."""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.activations import sigmoid


@triton.jit
def gated_norm(x, weight, gate, eps, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """RMS norm of `x` over `AXIS` (SIZE entries, zeros beyond), times the sigmoid of `gate`."""
    scale = tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) / SIZE + eps)
    return x * scale * weight * sigmoid(gate)
