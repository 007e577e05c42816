"""Sends a step's small arrays to the device in one copy.

The kernels of a step read dozens of short index arrays. They are packed one after the other into
pinned memory, copied at once, and handed out as views of one device buffer. Arrays of the same
shapes always have the same addresses, as a CUDA graph requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

_ALIGNMENT = 16
_NUM_BUFFERS = 4
"""Number of host buffers: more than the two steps in flight, so that no buffer is written while a
copy reads it."""
_MAX_PACKINGS = 512
"""Number of step kinds (by their arrays' shapes) whose places in the buffers are remembered."""

T = TypeVar("T")


class _Packing:
    """Places of arrays of some shapes in the buffers, one after the other. Prompts that are not
    graphs have shapes of their own, and the device waits while their packing is made."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._kinds: list[tuple[int, np.dtype[Any], tuple[int, ...]]] = []
        self._places: dict[int, tuple[torch.Tensor, list[np.ndarray]]] = {}
        self._views: list[torch.Tensor] | None = None
        self.num_bytes = 0
        for array in arrays:
            self._kinds.append((self.num_bytes, array.dtype, array.shape))
            self.num_bytes += _aligned(array.nbytes)

    def places(self, turn: int, buffer: torch.Tensor) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Returns the part of this turn's host buffer that the arrays fill, and the place of
        each."""
        if turn not in self._places:
            memory = buffer.numpy()
            parts = [np.ndarray(shape, dtype, memory, begin) for begin, dtype, shape in self._kinds]
            self._places[turn] = buffer[: self.num_bytes], parts
        return self._places[turn]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns each array's part of the device buffer."""
        if self._views is None:
            dtypes = dict.fromkeys(dtype for _, dtype, _ in self._kinds)
            typed = {dtype: buffer.view(_torch_dtype(dtype)) for dtype in dtypes}
            self._views = []
            for begin, dtype, shape in self._kinds:
                first, num = begin // dtype.itemsize, prod(shape)
                flat = typed[dtype][first : first + num]
                self._views.append(flat if len(shape) == 1 else flat.view(shape))
        return self._views


@dataclass(frozen=True, slots=True)
class _Entries:
    """Places in a table, and their values."""

    indices: Any
    values: Any


class Staging:
    """Buffers for up to `num_bytes` of arrays per step."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        assert num_bytes % _ALIGNMENT == 0, "a buffer can be viewed as any type"
        self._device_buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host_buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(_NUM_BUFFERS)
        ]
        self._copied = [
            torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
            for _ in range(_NUM_BUFFERS)
        ]
        self._next = 0
        self._packings: dict[tuple[Any, ...], _Packing] = {}
        """Maps the arrays' types and shapes to their packing."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that a step may send."""
        return self._device_buffer.nbytes

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of all host buffers together."""
        return sum(buffer.nbytes for buffer in self._host_buffers)

    def send(self, batch: Any) -> torch.cuda.Event | None:
        """Copies every array in `batch`, a dataclass that may hold more dataclasses and mappings,
        to the device. Returns an event that passes once they are there; a later send records it
        again."""
        turn, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
        event, arrays = self._copied[turn], _arrays(batch)
        packing = self._packing(arrays)
        if event is not None:
            event.synchronize()  # done long ago, unless the host is far ahead
        whole, places = packing.places(turn, self._host_buffers[turn])
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        self._device_buffer[: packing.num_bytes].copy_(whole, non_blocking=True)
        if event is not None:
            event.record()
        return event

    def views(self, batch: T) -> T:
        """Returns the dataclass with device tensors in place of arrays: the data that `send` wrote
        last, and will write for arrays of the same shapes."""
        views = iter(self._packing(_arrays(batch)).views(self._device_buffer))
        on_device: T = _replaced(batch, lambda _: next(views))
        return on_device

    def scatter(
        self, indices: np.ndarray, values: np.ndarray, table: torch.Tensor, at_once: int
    ) -> None:
        """Writes values to these places of a table on the device, `at_once` of them in a copy."""
        for first in range(0, len(indices), at_once):
            part = slice(first, first + at_once)
            entries = _Entries(indices[part], values[part])
            self.send(entries)
            views = self.views(entries)
            table.view(-1).index_copy_(0, views.indices, views.values)

    def _packing(self, arrays: Sequence[np.ndarray]) -> _Packing:
        """Returns the packing of arrays of these shapes; most steps repeat earlier shapes."""
        shapes = tuple([(array.dtype.char, array.shape) for array in arrays])
        packing = self._packings.get(shapes)
        if packing is None:
            packing = _Packing(arrays)
            assert packing.num_bytes <= self.num_bytes, "a step's arrays fit the staging buffer"
            if len(self._packings) == _MAX_PACKINGS:
                self._packings.clear()
            self._packings[shapes] = packing
        return packing


def on_device(batch: T, device: torch.device) -> T:
    """Returns the dataclass with device tensors in place of arrays, each copied separately; on a
    CPU none is copied."""
    copied: T = _replaced(batch, lambda array: torch.from_numpy(array).to(device))
    return copied


def num_staged_bytes(batch: Any) -> int:
    """Returns the bytes that the arrays in `batch` take in a buffer."""
    return sum(_aligned(array.nbytes) for array in _arrays(batch))


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _arrays(batch: Any) -> list[np.ndarray]:
    """Returns the arrays in the order of the fields. This runs in every step, while the device may
    wait."""
    arrays: list[np.ndarray] = []
    _gather(batch, arrays)
    return arrays


def _gather(batch: Any, found: list[np.ndarray]) -> None:
    parts: Iterable[Any]
    if isinstance(batch, dict):
        parts = batch.values()
    else:
        kind: type = type(batch)
        parts = [getattr(batch, name) for name in _field_names(kind)]
    for part in parts:
        if isinstance(part, np.ndarray):
            found.append(part)
        elif not isinstance(part, int):
            _gather(part, found)


def _replaced(batch: Any, view: Any) -> Any:
    if isinstance(batch, np.ndarray):
        return view(batch)
    if isinstance(batch, dict):
        return {name: _replaced(value, view) for name, value in batch.items()}
    kind: type = type(batch)
    names = _field_names(kind)
    inside = {name: _replaced(getattr(batch, name), view) for name in names}
    return replace(batch, **inside) if inside else batch


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Returns the field names of a dataclass; none for any other type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
