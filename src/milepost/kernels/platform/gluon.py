"""Gluon: names that differ between the supported versions of Triton (3.6 to 3.9), and rounding to
FP8."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from milepost.kernels.platform.tensors import FP8_MAX, LEAST_SCALE

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All threads of a program wait for each other; called `barrier` from 3.7 on."""

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""TMA copies a box of a tensor to shared memory; called `async_load` from 3.8 on."""

store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""TMA writes a box of a tensor from shared memory; called `async_store` from 3.8 on."""

_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)


@gluon.jit
def round_block(x, AXIS: gl.constexpr):
    """Rounds float32 to FP8 as `forms.quantise_rows` does. Returns the numbers and the scales that
    they share along the last axis, AXIS."""
    scale = gl.maximum(gl.max(gl.abs(x), AXIS) / _LARGEST, _LEAST_SCALE)
    shared = scale
    if len(x.shape) > 1:
        shared = gl.expand_dims(scale, AXIS)
    return gl.minimum(gl.maximum(x / shared, -_LARGEST), _LARGEST).to(gl.float8e4nv), scale
