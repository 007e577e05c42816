"""Gluon: parts that Hopper's kernels share, and names that differ between the supported versions of
Triton (3.6 to 3.9).

A ring is a number of stages in shared memory. Some warps load steps of work to its stages, others
read them. Step n, counted through everything that a program does, is in stage n % STAGES. A stage
has two barriers: readers wait for the first until the step is loaded, and loading warps wait for
the second until all readers have released the step before. `bars` holds the first ones, then the
second ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.tensors import FP8_MAX, LEAST_SCALE

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All threads of a program wait for each other; called `barrier` from 3.7 on."""

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""TMA copies a box of a tensor to shared memory; called `async_load` from 3.8 on."""

store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""TMA writes a box of a tensor from shared memory; called `async_store` from 3.8 on."""

_SWIZZLED, _WIDEST = 8, 128
"""Lines of a box from which it is swizzled, as tensor cores read it, and bytes of a line that are
swizzled together, at most."""
_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)


def boxes_of(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    """Describes a matrix, or a stack of them as one, in boxes that TMA copies."""
    swizzle = min(width * matrix.itemsize, _WIDEST) if height >= _SWIZZLED else 0
    lines = matrix.flatten(0, -2)
    return TensorDescriptor.from_tensor(lines, [height, width], _layout(swizzle, matrix.itemsize))


@cache
def _layout(swizzle: int, itemsize: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=2)


class OperandStages(NamedTuple):
    """A ring that loads the operands of products: shared memory [stages or a multiple, ...] and
    barriers. None stands for what a kernel does not have."""

    inputs: Any
    weights: Any
    bars: Any
    row_scales: Any = None
    """Scales of the inputs' rows [stages or a multiple, 1, a whole line of 128 bytes]."""


@gluon.jit
def open_bars(STAGES: gl.constexpr, LOADS: gl.constexpr, READERS: gl.constexpr):
    """Allocates a ring's barriers. LOADS is the number of arrivals that make a step complete, and
    READERS the number of groups of warps that release it."""
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=LOADS)
        mbarrier.init(bars.index(STAGES + stage), count=READERS)
    return bars


@gluon.jit
def wait_loaded(bars, number):
    """Waits until a step is loaded; returns its stage."""
    STAGES: gl.constexpr = bars.shape[0] // 2
    stage = number % STAGES
    mbarrier.wait(bars.index(stage), number // STAGES & 1)
    return stage


@gluon.jit
def wait_free(bars, number):
    """Waits until a step may be loaded; returns its stage."""
    STAGES: gl.constexpr = bars.shape[0] // 2
    stage = number % STAGES
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def release(bars, stage):
    """Says that a group of warps has read a stage."""
    STAGES: gl.constexpr = bars.shape[0] // 2
    mbarrier.arrive(bars.index(STAGES + stage), count=1)


@gluon.jit
def round_block(x, AXIS: gl.constexpr):
    """Rounds float32 to FP8 as `forms.quantise_rows` does. Returns the numbers and the scales that
    they share along the last axis, AXIS."""
    scale = gl.maximum(gl.max(gl.abs(x), AXIS) / _LARGEST, _LEAST_SCALE)
    shared = scale
    if len(x.shape) > 1:
        shared = gl.expand_dims(scale, AXIS)
    return gl.minimum(gl.maximum(x / shared, -_LARGEST), _LARGEST).to(gl.float8e4nv), scale
