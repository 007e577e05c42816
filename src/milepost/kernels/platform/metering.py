"""Counts the bytes of tensors on torch's device `meta`, as a GPU's allocator would count them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDING = 512
"""torch's allocator hands out multiples of this."""


class Meter(TorchDispatchMode):
    """Counts tensors made inside: `num_bytes` of those that live, and their `peak` since the last
    `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak = 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count the memory of these, which others view."""
        for tensor in tensors:
            self._sizes[tensor.untyped_storage()] = 0

    def reset_peak(self) -> None:
        self.peak = self.num_bytes

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation of torch's and counts what it returns."""
        del types
        outcome = operation(*args, **(kwargs or {}))
        for each in outcome if isinstance(outcome, list | tuple) else (outcome,):
            if isinstance(each, torch.Tensor) and each.device.type == "meta":
                self._count(each.untyped_storage())
        return outcome

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._sizes:
            return
        size = -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        self._sizes[storage] = size
        self.num_bytes += size
        self.peak = max(self.peak, self.num_bytes)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.num_bytes -= size
