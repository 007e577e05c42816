"""The chips that kernels are compiled for, and a process that believes it has one of them.

What an engine asks of a GPU before it launches anything is answered from the table; tensors are on
the device `meta`, which has shapes and no memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from milepost.kernels.platform.device import CHIPS as KNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A row of the table."""

    arch: str
    """As Triton's target is called: sm_80, gfx942."""
    example: str
    num_sms: int
    shared_bytes: int
    """That a program may have: NVIDIA's "maximum amount of shared memory per thread block" of the
    compute capability, AMD's LDS per workgroup."""

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's, or what torch says of an AMD chip: gfx942 is (9, 4)."""
        digits = self.arch.removeprefix("sm_").removeprefix("gfx")
        return (int(digits[0]), int(digits[1])) if self.is_amd else divmod(int(digits), 10)

    @property
    def target(self) -> GPUTarget:
        if self.is_amd:
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)


CHIPS = {
    arch: Chip(arch=arch, example=example, num_sms=known.num_sms, shared_bytes=known.shared_bytes)
    for arch, (example, known) in KNOWN.items()
}


class _Driver:
    """What Triton asks of a GPU's driver to compile."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Inside, there is a GPU; a process can have one in its life, for kernels ask for it as they
    are imported."""
    assert not triton.knobs.runtime.interpret, "Triton's interpreter compiles nothing"
    properties = SimpleNamespace(
        name=chip.example,
        major=chip.capability[0],
        minor=chip.capability[1],
        multi_processor_count=chip.num_sms,
        shared_memory_per_block_optin=chip.shared_bytes,
        gcnArchName=chip.arch,
    )
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda _=None: chip.capability,
        "get_device_properties": lambda _=None: properties,
        "synchronize": lambda _=None: None,
        "memory_allocated": lambda _=None: 0,
        "max_memory_allocated": lambda _=None: 0,
        "reset_peak_memory_stats": lambda _=None: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
        version = "7.0" if chip.is_amd else None
        stack.enter_context(mock.patch("torch.version.hip", version))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(_is_meta)))
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", _address))
        # It stays: without a GPU Triton has no driver to go back to.
        triton.runtime.driver.set_active(_Driver(chip.target))
        yield


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _address(tensor: torch.Tensor) -> Any:
    """As if memory began at a multiple of any alignment."""
    return tensor.storage_offset() * tensor.element_size()


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
