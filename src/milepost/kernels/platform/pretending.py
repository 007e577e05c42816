"""A pretended GPU: a process is told that there is one, so an engine can be put together without
launching anything.

What torch and Triton are asked about a GPU is answered from a `Chip`. Tensors are on torch's device
`meta`, which has shapes and no memory; a `Meter` counts what a GPU's allocator would take for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from milepost.kernels.platform.device import Chip

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


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
        """Leaves these tensors and their views out of the count."""
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


def target_of(chip: Chip) -> GPUTarget:
    """Returns the chip as Triton's compilers call it."""
    # Imported here because triton need not be installed on machines without a GPU.
    from triton.backends.compiler import GPUTarget

    if chip.is_amd:
        return GPUTarget("hip", chip.arch, 64)
    return GPUTarget("cuda", int(chip.arch.removeprefix("sm_")), 32)


@contextmanager
def pretend(chip: Chip, *, example: str = "") -> Iterator[Meter]:
    """Pretends inside that there is a GPU, whose tensors are on `meta`. A process can pretend one
    chip only, since kernels ask for it when they are imported."""
    # Imported here because triton need not be installed on machines without a GPU.
    import triton

    assert not triton.knobs.runtime.interpret, "Triton's interpreter compiles nothing"
    meter = Meter()
    major, minor = _capability(chip)
    properties = SimpleNamespace(
        name=example or chip.arch,
        major=major,
        minor=minor,
        multi_processor_count=chip.num_sms,
        shared_memory_per_block_optin=chip.shared_bytes,
        gcnArchName=chip.arch,
    )
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda _=None: (major, minor),
        "get_device_properties": lambda _=None: properties,
        "get_device_name": lambda _=None: properties.name,
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda _=None: meter.num_bytes,
        "max_memory_allocated": lambda _=None: meter.peak,
        "reset_peak_memory_stats": lambda _=None: meter.reset_peak(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
        version = "7.0" if chip.is_amd else None
        stack.enter_context(mock.patch("torch.version.hip", version))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(_is_meta)))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", _address))
        blas = "torch.backends.cuda.preferred_blas_library"
        stack.enter_context(mock.patch(blas, lambda library=None: library))
        # `_scaled_mm` allocates memory even if it is given an output.
        stack.enter_context(mock.patch.object(torch, "_scaled_mm", lambda *_, out, **__: out))
        # The driver stays: without a GPU Triton has no other to return to.
        triton.runtime.driver.set_active(_Driver(target_of(chip)))
        yield meter


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Makes launches inside do nothing: they neither look at arguments nor compile or run
    kernels."""
    # Imported here because triton need not be installed on machines without a GPU.
    from triton.runtime.jit import JITFunction

    def run(*_: object, **__: object) -> None:
        """Launches nothing. A mock would keep the arguments, so the meter would never free them."""

    with mock.patch.object(JITFunction, "run", run):
        yield


class _Driver:
    """Answers for Triton, which asks a GPU's driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def _capability(chip: Chip) -> tuple[int, int]:
    """Returns NVIDIA's capability, or what torch says of an AMD chip: gfx942 is (9, 4)."""
    digits = chip.arch.removeprefix("gfx")
    return (int(digits[0]), int(digits[1])) if chip.is_amd else chip.capability


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _address(tensor: torch.Tensor) -> Any:
    """Returns an address, as if memory began at a multiple of any alignment."""
    return tensor.storage_offset() * tensor.element_size()
