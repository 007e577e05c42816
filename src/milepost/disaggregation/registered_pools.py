"""The layout of an engine's pools in memory, by which others read pages and slots."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from milepost.disaggregation.messages import Layout, MemoryRows

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.runner.pools import Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredMemory:
    """The pools of one engine, as memory to read from."""

    layout: Layout
    ranges: list[tuple[int, int]]
    """Address and bytes of each memory allocation that holds a part of the pools."""
    device: int | None
    """Number of the GPU; None for main memory."""


def memory_of(pools: Pools) -> RegisteredMemory:
    """Returns the layout and memory of the pages and slots of `pools`, and of pages of windows."""
    pages = [_row(pools.all_kv)] if pools.all_kv is not None else []
    if pools.all_conv is not None:  # zeros first, then one row for each page
        pages += [_row(layer[1:]) for layer in pools.all_conv]
    slots = [_row(tensor) for tensor in _states(pools)]
    windows = [_row(pools.all_windows)] if pools.all_windows is not None else []
    tensors = [pools.all_kv, pools.all_conv, pools.all_windows, *_states(pools)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    ranges = {storage.data_ptr(): storage.nbytes() for storage in storages}
    (device,) = {tensor.device for tensor in tensors if tensor is not None}
    return RegisteredMemory(
        layout=Layout(pages=pages, slots=slots, windows=windows),
        ranges=sorted(ranges.items()),
        device=None if device.type == "cpu" else device.index or 0,
    )


def _states(pools: Pools) -> Iterator[Tensor]:
    for state in pools.states.values():
        yield from (part for part in (state.recurrent, state.conv) if part.numel())
    if pools.carried is not None:
        yield pools.carried.states


def _row(tensor: Tensor) -> MemoryRows:
    """Returns the row of a tensor whose first dimension counts pages or slots."""
    assert tensor[0].is_contiguous(), "a page or a state of a layer lies in one piece"
    item = tensor.element_size()
    return MemoryRows(
        tensor.data_ptr(), tensor.stride(0) * item, tensor[0].numel() * item, len(tensor)
    )


def pieces(rows: list[MemoryRows], ids: tuple[int, ...], first: int) -> list[int]:
    """Returns the numbers of these pages' or slots' pieces, row by row, when all pieces are counted
    from `first` on. Raises IndexError for an id out of range.
    """
    found: list[int] = []
    for row in rows:
        if any(not 0 <= id_ < row.count for id_ in ids):
            raise IndexError(f"a page or slot of {ids} is none of {row.count}")
        found += [first + id_ for id_ in ids]
        first += row.count
    return found


def pieces_of(
    layout: Layout, pages: tuple[int, ...], slot: int | None, windows: tuple[int, ...] = ()
) -> list[int]:
    """Returns the numbers of all pieces of these pages, this slot and these pages of windows."""
    found, first = [], 0
    ids = pages, () if slot is None else (slot,), windows
    for rows, row_ids in zip(layout.kinds, ids, strict=True):
        found += pieces(rows, row_ids, first)
        first += sum(row.count for row in rows)
    return found


class PieceViews:
    """All pieces of main memory, by number."""

    def __init__(self, layout: Layout) -> None:
        self._rows = layout.rows
        self._kinds = [kind for kind, rows in enumerate(layout.kinds) for _ in rows]
        self._firsts: list[int] = []
        self._num = 0
        for row in self._rows:
            self._firsts.append(self._num)
            self._num += row.count

    def num_of(self, *nums: int) -> int:
        """Returns the number of pieces that pages, slots and pages of windows take; `nums` counts
        these."""
        return sum(nums[kind] for kind in self._kinds)

    def owner(self, number: int) -> tuple[int, int]:
        """Returns the kind that a piece belongs to, by its place among `Layout.kinds`, and the id
        of its page or slot. Raises IndexError.
        """
        index, id_ = self._find(number)
        return self._kinds[index], id_

    def view(self, number: int) -> memoryview:
        """Returns the bytes of a piece. Raises IndexError."""
        index, id_ = self._find(number)
        row: MemoryRows = self._rows[index]
        start = row.address + id_ * row.stride
        return memoryview((ctypes.c_char * row.length).from_address(start)).cast("B")

    def _find(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self._num:
            raise IndexError(f"it asks for piece {number} of memory, of {self._num}")
        index = bisect_right(self._firsts, number) - 1
        return index, number - self._firsts[index]
