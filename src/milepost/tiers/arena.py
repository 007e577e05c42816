"""Host memory for pages and states: one allocation, pinned if there is a GPU.

An item's place holds its bytes from every pool that has a row for it, part by part, as on the
device.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from milepost.cache.plans import What
from milepost.runner.pools import Pools
from milepost.tiers.commands import ItemRun

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
        """Copies `num` places from `source`, on any device, without waiting for the device. Window
        pages that one of the two keeps elsewhere are left out."""
        for tensor, other in zip(self.tensors, source.tensors, strict=False):
            tensor[first : first + num].copy_(
                other[source_first : source_first + num], non_blocking=True
            )

    def buffers(self, place: int) -> list[memoryview]:
        """Returns the bytes of one item, which must be in host memory."""
        return [part[place].reshape(-1).view(torch.uint8).numpy().data for part in self.tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Places for pages and for states. The last of a state's tensors holds its window pages, in
    order, except on the device."""

    pages: ItemTensors
    states: ItemTensors
    windows: Tensor | None = None
    """The pool of window pages, [ids, ...], which only the device has."""
    windows_each: int = 0
    """Largest number of window pages of a state."""

    def of(self, what: What) -> ItemTensors:
        return self.states if what == "state" else self.pages

    @property
    def state_bytes(self) -> int:
        """Bytes of a state with its window pages."""
        windows = self.windows
        window_bytes = 0 if windows is None else prod(windows.shape[1:]) * windows.itemsize
        return self.states.item_bytes + self.windows_each * window_bytes

    def copy(self, source: Arena, run: ItemRun) -> None:
        """Copies items from another arena, including a state's window pages if one of the two is
        the device."""
        what, first, source_first, num, windows = run
        self.of(what).copy(first, source.of(what), source_first, num)
        for index, page in enumerate(windows):
            if source.windows is not None:
                place, page_values = self.states.tensors[-1][first, index], source.windows[page]
            else:
                assert self.windows is not None, "one of both is the device"
                page_values = source.states.tensors[-1][source_first, index]
                place = self.windows[page]
            place.copy_(page_values, non_blocking=True)


def device_memory(pools: Pools, windows_each: int = 0) -> Arena:
    """Returns the pools as an arena, whose places are the ids of pages and slots. A state has up to
    `windows_each` window pages."""
    return Arena(
        pages=ItemTensors(tensors=tuple(pools.page_parts)),
        states=ItemTensors(tensors=tuple(pools.slot_parts)),
        windows=pools.all_windows,
        windows_each=windows_each,
    )


def _shapes(memory: Arena) -> Iterator[tuple[bool, list[tuple[tuple[int, ...], torch.dtype]]]]:
    """Yields the shapes and types of the tensors in a place for pages, then in one for states."""
    yield False, [(tuple(part.shape[1:]), part.dtype) for part in memory.pages.tensors]
    kinds = [(tuple(part.shape[1:]), part.dtype) for part in memory.states.tensors]
    if memory.windows is not None:
        kinds.append(((memory.windows_each, *memory.windows.shape[1:]), memory.windows.dtype))
    yield True, kinds


def like(memory: Arena, num_pages: int, num_states: int, buffer: Tensor) -> Arena:
    """Returns an arena with the parts of `memory` in `buffer` [bytes], which holds at least
    `num_bytes`.
    """
    begin, kinds = 0, []
    for are_states, parts in _shapes(memory):
        tensors, num = [], num_states if are_states else num_pages
        for each, dtype in parts:
            shape = num, *each
            num_bytes = prod(shape) * dtype.itemsize
            tensors.append(buffer[begin : begin + num_bytes].view(dtype).view(shape))
            begin += _round_up(num_bytes)
        kinds.append(ItemTensors(tensors=tuple(tensors)))
    return Arena(pages=kinds[0], states=kinds[1])


def num_bytes(memory: Arena, num_pages: int, num_states: int) -> int:
    """Returns the size in bytes of an arena with `num_pages` and `num_states` places."""
    total = 0
    for are_states, parts in _shapes(memory):
        num = num_states if are_states else num_pages
        total += sum(_round_up(num * prod(shape) * dtype.itemsize) for shape, dtype in parts)
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
    buffer = np.frombuffer(mapped, np.uint8)
    if is_pinned:
        _pin(buffer)
    return like(memory, num_pages, num_states, torch.from_numpy(buffer))


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
    merged: list[tuple[int, int, int]] = []
    for one, other in pairs:
        if merged:
            first, second, num = merged[-1]
            if (one, other) == (first + num, second + num) and num < most:
                merged[-1] = first, second, num + 1
                continue
        merged.append((one, other, 1))
    return merged


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
