"""Runs these tests as on another chip: with `--as-chip sm_89` kernels are cut up, and chosen, as
for it, though they are compiled for the GPU that is there.

    python -m pytest tests/gpu --as-chip sm_89
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from milepost.kernels.platform import device

SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99}
"""Shared memory of a program, by chip."""


class Pretended:
    """torch, as the probe sees it, on another chip. Triton asks torch itself, and so compiles for
    the GPU that is there.
    """

    def __init__(self, arch: str) -> None:
        properties = torch.cuda.get_device_properties(0)
        said = SimpleNamespace(
            multi_processor_count=properties.multi_processor_count,
            shared_memory_per_block_optin=SHARED_KIB[arch] << 10,
        )
        self.cuda = SimpleNamespace(
            get_device_properties=lambda _device: said,
            get_device_capability=lambda _device: (int(arch[3:-1]), int(arch[-1])),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-chip", choices=list(SHARED_KIB), help="cut kernels up as for this chip")


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("--as-chip")
    if arch is not None and torch.cuda.is_available():
        device.torch = Pretended(arch)
