"""The chips that kernels are compiled for, and a process that believes it has one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from milepost.kernels.platform import pretending
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
        """NVIDIA's; (0, 0) for AMD."""
        return KNOWN[self.arch][1].capability

    @property
    def target(self) -> GPUTarget:
        return pretending.target_of(KNOWN[self.arch][1])


CHIPS = {
    arch: Chip(arch=arch, example=example, num_sms=known.num_sms, shared_bytes=known.shared_bytes)
    for arch, (example, known) in KNOWN.items()
}


@contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Inside, there is a GPU; a process can have one in its life, for kernels ask for it as they
    are imported."""
    with pretending.pretend(KNOWN[chip.arch][1], example=chip.example):
        yield


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
