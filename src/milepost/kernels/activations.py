"""Triton: activations that several operations' kernels have; all in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x.to(tl.float32)))


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))
