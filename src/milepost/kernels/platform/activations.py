"""Triton: activations that several operations' kernels have; all in float32."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(x):
    return 1 / (1 + _exp_negative(x.to(tl.float32)))


@triton.jit
def silu(x):
    return x / (1 + _exp_negative(x))


@triton.jit
def _exp_negative(x):
    """exp(-x); of base 2 it is one instruction, where tl.exp also looks for subnormal numbers."""
    return tl.exp2(x * -LOG2_E)


@triton.jit
def softplus(x):
    """log(1 + exp(x)); the logarithm by a polynomial, which takes half of the instructions."""
    e = _exp_negative(tl.abs(x))
    # log(1 + e) / e on [0, 1], through Chebyshev's nodes: off by 1.7e-7 at most.
    p = e * 0.005126102361828089 - 0.029074065387248993
    p = p * e + 0.0775160863995552
    p = p * e - 0.13602247834205627
    p = p * e + 0.19076880812644958
    p = p * e - 0.2483539879322052
    p = p * e + 0.3331812024116516
    p = p * e - 0.4999944567680359
    p = p * e + 0.9999999403953552
    return tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL) + e * p
