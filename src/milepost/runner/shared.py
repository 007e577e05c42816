"""One memory for pages and slots, without a fixed boundary between them.

The memory is cut into equal *units*. A unit is one slot, of the same number, or `pages_each` pages:
unit u is the pages u * pages_each ... (u + 1) * pages_each - 1. Only the cache knows which, and
that may change: unwritten memory holds anything, even NaN.

    unit           0           1              2
    as pages       (zeros)     [ 2  ][ 3  ]   [ 4  ][ 5  ]      pages_each = 2
    as a slot      (zeros)     [ 1        ]   [ 2        ]

Unit 0 is the zero slot. Pages are padded so that they fill a unit evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor

from milepost.cache.memory import pages_in_place
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools, by_layer, zeros

_ALIGNMENT = 1024
"""Alignment in bytes of pages and of each layer's states. Wide loads and TMA need 16; TMA rows of
128 float32 need 512 from slot to slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of a shared memory: one slot, or `pages_each` pages."""

    pages_each: int
    page_stride: int
    """Number of bytes from one page to the next."""

    @property
    def num_bytes(self) -> int:
        return self.pages_each * self.page_stride


def why_apart(shape: PoolShape) -> str:
    """Says why pages and slots need separate memories; empty if they may share one."""
    if not shape.attention:
        return "the model has no attention layers, so nothing lies in pages"
    if shape.windows:
        return "layers with a sliding window have pages of their own"
    if shape.convolutions:
        return "the model's short convolutions keep their states beside pages"
    if not shape.recurrent:
        return "the model has no recurrent layers, so nothing lies in state slots"
    if shape.slot_bytes < shape.page_bytes:
        return (
            f"a state of {shape.slot_bytes} bytes is smaller than a page of {shape.page_size} "
            f"tokens, {shape.page_bytes} bytes"
        )
    return ""


def best_unit(shape: PoolShape) -> Unit:
    """Returns the unit that leaves the least unused; `shape` may share a memory (`why_apart`)."""
    return unit_of(shape, pages_in_place(shape.page_bytes, shape.slot_bytes))


def unit_of(shape: PoolShape, pages_each: int) -> Unit:
    """Returns the smallest unit of `pages_each` pages that also holds a slot."""
    num_layers = len(shape.recurrent)
    slot_bytes = num_layers * sum(_state_bytes(shape)) + _carried_bytes(shape)
    row_bytes = prod(shape.page_shape[-2:]) * shape.dtype_of_kv.itemsize
    least = max(shape.page_bytes, -(-slot_bytes // pages_each))
    return Unit(pages_each=pages_each, page_stride=_round_up(least, lcm(row_bytes, _ALIGNMENT)))


def allocate_shared(
    shape: PoolShape, *, num_units: int, pages_each: int, device: torch.device
) -> Pools:
    """Allocates zeroed pools in one memory, of `num_units` units besides unit 0.

    A slot holds the recurrent states of all layers, then the inputs of their convolutions, then the
    state it carries for a head.
    """
    unit, (recurrent_bytes, conv_bytes) = unit_of(shape, pages_each), _state_bytes(shape)
    spec, num_layers, num_slots = shape.recurrent[0], len(shape.recurrent), num_units + 1
    memory = zeros(num_slots * unit.num_bytes, device)
    recurrent = _view(
        memory,
        shape.state_dtype,
        (num_layers, num_slots, *spec.recurrent_shape),
        (recurrent_bytes, unit.num_bytes),
    )
    conv = _view(
        memory[num_layers * recurrent_bytes :],
        shape.dtype,
        (num_layers, num_slots, *spec.conv_shape),
        (conv_bytes, unit.num_bytes),
    )
    pages = num_slots * pages_each, *shape.page_shape
    kv = _view(memory, shape.dtype_of_kv, pages, (unit.page_stride,))
    return by_layer(shape, kv, conv, recurrent, carried=_carried(shape, memory, unit))


def _state_bytes(shape: PoolShape) -> tuple[int, int]:
    """Returns one layer's bytes of recurrent state and of convolution inputs, each aligned."""
    spec = shape.recurrent[0]
    recurrent_bytes = prod(spec.recurrent_shape) * shape.state_dtype.itemsize
    conv_bytes = prod(spec.conv_shape) * shape.dtype.itemsize
    return _round_up(recurrent_bytes, _ALIGNMENT), _round_up(conv_bytes, _ALIGNMENT)


def _carried_bytes(shape: PoolShape) -> int:
    return _round_up(shape.carried_size * shape.dtype.itemsize, _ALIGNMENT)


def _carried(shape: PoolShape, memory: Tensor, unit: Unit) -> Tensor | None:
    """Returns the carried states [slots, carried_size], stored after each slot's other states."""
    if not shape.carried_size:
        return None
    first = len(shape.recurrent) * sum(_state_bytes(shape))
    size = len(memory) // unit.num_bytes, shape.carried_size
    return _view(memory[first:], shape.dtype, size, (unit.num_bytes,))


def _view(
    memory: Tensor, dtype: torch.dtype, size: tuple[int, ...], steps: tuple[int, ...]
) -> Tensor:
    """Returns `memory` [bytes] as a tensor; `steps` are the strides of its first dimensions in
    bytes, and the others are contiguous."""
    inner = [prod(size[index + 1 :]) for index in range(len(steps), len(size))]
    strides = [step // dtype.itemsize for step in steps] + inner
    return memory.view(dtype).as_strided(size, strides)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
