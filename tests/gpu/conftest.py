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
from milepost.kernels.platform.device import CHIPS

OTHERS = [arch for arch in CHIPS if arch != "sm_90"]


class Pretended:
    """torch, as the probe sees it, on another chip. Triton asks torch itself, and so compiles for
    the GPU that is there.
    """

    def __init__(self, arch: str) -> None:
        chip, properties = CHIPS[arch][1], torch.cuda.get_device_properties(0)
        said = SimpleNamespace(
            multi_processor_count=properties.multi_processor_count,
            shared_memory_per_block_optin=chip.shared_bytes,
            gcnArchName=arch,
        )
        self.cuda = SimpleNamespace(
            get_device_properties=lambda _device: said,
            get_device_capability=lambda _device: chip.capability,
            is_available=torch.cuda.is_available,
        )
        self.version = SimpleNamespace(hip="7.0" if chip.is_amd else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-chip", choices=OTHERS, help="cut kernels up as for this chip")


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("--as-chip")
    if arch is not None and torch.cuda.is_available():
        device.torch = Pretended(arch)
