"""Activations that kernels in Gluon round to float8 on the way, as `forms.quantise_rows` does."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.float8 import FP8_MAX, LEAST_SCALE

_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)


@gluon.jit
def round_block(x, AXIS: gl.constexpr):
    """Float32 numbers as float8, and the scales that they share along the last axis, AXIS."""
    scale = gl.maximum(gl.max(gl.abs(x), AXIS) / _LARGEST, _LEAST_SCALE)
    shared = scale
    if AXIS:
        shared = gl.expand_dims(scale, AXIS)
    return gl.minimum(gl.maximum(x / shared, -_LARGEST), _LARGEST).to(gl.float8e4nv), scale
