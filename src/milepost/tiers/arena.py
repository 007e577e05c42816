"""Host memory for pages and states: one allocation, pinned if there is a GPU.

An item's place holds its bytes from every pool that has a row for it, part by part, as on the
device.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from milepost.cache.plans import What
from milepost.runner.pools import Pools

GIB = 2**30
_ALIGNMENT = 4096
"""Alignment of each part, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTensors:
    """Tensors [places, ...] of one kind of item; row `i` of each belongs to item `i`."""

    tensors: tuple[Tensor, ...]

    @property
    def item_bytes(self) -> int:
        return sum(prod(part.shape[1:]) * part.itemsize for part in self.tensors)

    def copy(self, first: int, source: ItemTensors, source_first: int, num: int) -> None:
        """Copies `num` places from `source`, on any device, without waiting for the device."""
        for own, other in zip(self.tensors, source.tensors, strict=True):
            own[first : first + num].copy_(
                other[source_first : source_first + num], non_blocking=True
            )

    def buffers(self, place: int) -> list[memoryview]:
        """Returns the bytes of one item, which must be in host memory."""
        return [
            memoryview(part[place].reshape(-1).view(torch.uint8).numpy()) for part in self.tensors
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Places for pages and for states."""

    pages: ItemTensors
    states: ItemTensors

    def of(self, what: What) -> ItemTensors:
        return self.states if what == "state" else self.pages


def device_memory(pools: Pools) -> Arena:
    """Returns the pools as an arena, whose places are the ids of pages and slots."""
    return Arena(
        pages=ItemTensors(tensors=tuple(pools.page_parts)),
        states=ItemTensors(tensors=tuple(pools.slot_parts)),
    )


def like(memory: Arena, num_pages: int, num_states: int, buffer: Tensor) -> Arena:
    """Returns an arena with the parts of `memory` in `buffer` [bytes], which holds at least
    `num_bytes`.
    """
    begin, found = 0, []
    for parts, num in ((memory.pages, num_pages), (memory.states, num_states)):
        own = []
        for part in parts.tensors:
            shape = num, *part.shape[1:]
            num_bytes = prod(shape) * part.itemsize
            own.append(buffer[begin : begin + num_bytes].view(part.dtype).view(shape))
            begin += _round_up(num_bytes)
        found.append(ItemTensors(tensors=tuple(own)))
    return Arena(pages=found[0], states=found[1])


def num_bytes(memory: Arena, num_pages: int, num_states: int) -> int:
    """Returns the size in bytes of an arena with this many places."""
    total = 0
    for parts, num in ((memory.pages, num_pages), (memory.states, num_states)):
        total += sum(_round_up(num * prod(p.shape[1:]) * p.itemsize) for p in parts.tensors)
    return total


def allocate_host(memory: Arena, num_pages: int, num_states: int, *, is_pinned: bool) -> Arena:
    """Returns an arena in host memory. Raises MemoryError if the system refuses."""
    size = max(num_bytes(memory, num_pages, num_states), 1)
    try:
        mapped = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(
            f"{size / GIB:.1f} GiB of host memory: {error}; lower cache_host_gib"
        ) from error
    own = np.frombuffer(mapped, np.uint8)
    if is_pinned:
        _pin(own)
    return like(memory, num_pages, num_states, torch.from_numpy(own))


def allocate_staging(memory: Arena, num_pages: int, num_states: int) -> Arena:
    """Returns an arena on the device, from which copies to the host continue at their own pace."""
    device = (*memory.pages.tensors, *memory.states.tensors)[0].device
    size = max(num_bytes(memory, num_pages, num_states), 1)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return like(memory, num_pages, num_states, buffer)


def runs(pairs: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int, int]]:
    """Merges pairs of places into runs (first, first, number) of consecutive places in both, each
    of at most `most`.
    """
    found: list[tuple[int, int, int]] = []
    for one, other in pairs:
        if found:
            first, second, num = found[-1]
            if (one, other) == (first + num, second + num) and num < most:
                found[-1] = first, second, num + 1
                continue
        found.append((one, other, 1))
    return found


def _pin(memory: np.ndarray) -> None:
    """Pins `memory` until it is freed: otherwise the next mapping at its address could not be
    pinned. Raises MemoryError if the driver refuses.
    """
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(status):
        _clear_error()
        why = runtime.cudaGetErrorString(status)
        raise MemoryError(
            f"{memory.nbytes / GIB:.1f} GiB of host memory cannot be pinned: {why}; lower "
            "cache_host_gib"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data)


def _clear_error() -> None:
    """Clears the error that the CUDA runtime keeps for the next call, so that no step is reported
    as failed because of it.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _round_up(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
