"""Brings a step's small arrays to the device in one copy.

The kernels of a step read dozens of short index arrays. They are packed one behind the other into
pinned memory, copied at once, and handed out again as views of one device buffer. The views of
arrays of the same shapes lie at the same addresses every time, which a CUDA graph relies on.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

_ALIGNMENT = 16
_NUM_BUFFERS = 4
"""Steps under way, two at most, and then some: a buffer is not written while a copy reads it."""

T = TypeVar("T")


class Staging:
    """Buffers for up to `num_bytes` of arrays a step."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device_buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host_buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(_NUM_BUFFERS)
        ]
        self._host_views = [buffer.numpy() for buffer in self._host_buffers]
        self._copied = [
            torch.cuda.Event() if device.type == "cuda" else None for _ in range(_NUM_BUFFERS)
        ]
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """The most that a step may send."""
        return self._device_buffer.nbytes

    @property
    def num_pinned_bytes(self) -> int:
        """Of the host's buffers together."""
        return sum(buffer.nbytes for buffer in self._host_buffers)

    def send(self, batch: Any) -> None:
        """Copy every array in `batch`, a dataclass that may hold further ones and mappings, to the
        device."""
        turn, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
        event, view, end = self._copied[turn], self._host_views[turn], 0
        if event is not None:
            event.synchronize()  # done long ago, unless the host is far ahead
        for array in _arrays(batch):
            assert end + array.nbytes <= len(view), "a step's arrays fit the staging buffer"
            view[end : end + array.nbytes] = array.reshape(-1).view(np.uint8)
            end = _aligned(end + array.nbytes)
        self._device_buffer[:end].copy_(self._host_buffers[turn][:end], non_blocking=True)
        if event is not None:
            event.record()

    def views(self, batch: T) -> T:
        """The same dataclass with tensors on the device in place of the arrays: what `send` wrote
        last, and what it will write for arrays of the same shapes.
        """
        end = 0

        def view(array: np.ndarray) -> torch.Tensor:
            nonlocal end
            part = self._device_buffer[end : end + array.nbytes]
            end = _aligned(end + array.nbytes)
            dtype = torch.from_numpy(array[:0]).dtype
            return part.view(dtype).view(array.shape)

        return _replaced(batch, view)


def on_device(batch: T, device: torch.device) -> T:
    """The same dataclass with tensors on the device, each copied by itself; on a CPU none is."""
    return _replaced(batch, lambda array: torch.from_numpy(array).to(device))


def num_staged_bytes(batch: Any) -> int:
    """What the arrays in `batch` take of a buffer."""
    return sum(_aligned(array.nbytes) for array in _arrays(batch))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _arrays(batch: Any) -> list[np.ndarray]:
    """In the order of the fields. Looked for in every step, while the device may wait."""
    found: list[np.ndarray] = []
    _gather(batch, found)
    return found


def _gather(batch: Any, found: list[np.ndarray]) -> None:
    if isinstance(batch, np.ndarray):
        found.append(batch)
    elif isinstance(batch, dict):
        for value in batch.values():
            _gather(value, found)
    else:
        for name in _field_names(type(batch)):
            _gather(getattr(batch, name), found)


def _replaced(batch: Any, view: Any) -> Any:
    if isinstance(batch, np.ndarray):
        return view(batch)
    if isinstance(batch, dict):
        return {name: _replaced(value, view) for name, value in batch.items()}
    names = _field_names(type(batch))
    inside = {name: _replaced(getattr(batch, name), view) for name in names}
    return replace(batch, **inside) if inside else batch


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Of a dataclass; none of anything else."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
