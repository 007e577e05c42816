"""Host memory for pages and states: one allocation, pinned where there is a GPU.

An item's place holds the bytes of every pool that has a row for it, part by part, as they stand on
the device.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from milepost.cache.plans import What
from milepost.runner.pools import Pools

_ALIGNMENT = 4096
"""Bytes: each part begins at a multiple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What items of one kind are made of: tensors [places, ...], whose rows are one item's."""

    tensors: tuple[Tensor, ...]

    @property
    def item_bytes(self) -> int:
        return sum(prod(part.shape[1:]) * part.itemsize for part in self.tensors)

    def copy(self, first: int, source: Parts, source_first: int, num: int) -> None:
        """Fill `num` places from others', wherever those are; does not wait for a device."""
        for own, other in zip(self.tensors, source.tensors, strict=True):
            own[first : first + num].copy_(
                other[source_first : source_first + num], non_blocking=True
            )

    def buffers(self, place: int) -> list[memoryview]:
        """The bytes of one item in host memory."""
        return [
            memoryview(part[place].reshape(-1).view(torch.uint8).numpy()) for part in self.tensors
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Places for pages and for states."""

    pages: Parts
    states: Parts

    def of(self, what: What) -> Parts:
        return self.states if what == "state" else self.pages


def device_memory(pools: Pools) -> Memory:
    """The pools themselves: places are the ids of pages and slots."""
    return Memory(
        pages=Parts(tensors=tuple(pools.page_parts)), states=Parts(tensors=tuple(pools.slot_parts))
    )


def like(memory: Memory, num_pages: int, num_states: int, buffer: Tensor) -> Memory:
    """Places of the same parts in `buffer` [bytes], which has `num_bytes` of them at least."""
    begin, found = 0, []
    for parts, num in ((memory.pages, num_pages), (memory.states, num_states)):
        own = []
        for part in parts.tensors:
            shape = num, *part.shape[1:]
            num_bytes = prod(shape) * part.itemsize
            own.append(buffer[begin : begin + num_bytes].view(part.dtype).view(shape))
            begin += _round_up(num_bytes)
        found.append(Parts(tensors=tuple(own)))
    return Memory(pages=found[0], states=found[1])


def num_bytes(memory: Memory, num_pages: int, num_states: int) -> int:
    """Of so many places."""
    total = 0
    for parts, num in ((memory.pages, num_pages), (memory.states, num_states)):
        total += sum(_round_up(num * prod(p.shape[1:]) * p.itemsize) for p in parts.tensors)
    return total


def allocate_host(memory: Memory, num_pages: int, num_states: int, *, is_pinned: bool) -> Memory:
    """Places in host memory. Raises MemoryError if the system refuses."""
    size = max(num_bytes(memory, num_pages, num_states), 1)
    try:
        mapped = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from error
    buffer = torch.from_numpy(np.frombuffer(mapped, np.uint8))
    if is_pinned:
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)
        if int(status):
            raise MemoryError(f"{size} bytes of host memory cannot be pinned: {status}")
    return like(memory, num_pages, num_states, buffer)


def allocate_staging(memory: Memory, num_pages: int, num_states: int) -> Memory:
    """Places on the device, from which copies go on at their own pace."""
    device = (*memory.pages.tensors, *memory.states.tensors)[0].device
    size = max(num_bytes(memory, num_pages, num_states), 1)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return like(memory, num_pages, num_states, buffer)


def runs(pairs: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int, int]]:
    """Pairs of places as runs (first, first, number) that go up in both, of `most` at most."""
    found: list[tuple[int, int, int]] = []
    for one, other in pairs:
        if found:
            first, second, num = found[-1]
            if (one, other) == (first + num, second + num) and num < most:
                found[-1] = first, second, num + 1
                continue
        found.append((one, other, 1))
    return found


def _round_up(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
