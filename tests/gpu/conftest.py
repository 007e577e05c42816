"""Runs these tests as on another chip: with `--as-chip sm_89` kernels are cut up, and chosen, as
for it, though they are compiled for the GPU that is there.

    python -m pytest tests/gpu --as-chip sm_89
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99}
"""Shared memory of a program, by chip."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-chip", choices=list(SHARED_KIB), help="cut kernels up as for this chip")


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("--as-chip")
    if arch is None or not torch.cuda.is_available():
        return
    major, minor = int(arch[3:-1]), int(arch[-1])
    properties = SimpleNamespace(
        multi_processor_count=torch.cuda.get_device_properties(0).multi_processor_count,
        shared_memory_per_block_optin=SHARED_KIB[arch] << 10,
    )
    # What the probe asks, before it is asked.
    torch.cuda.get_device_properties = lambda _device=None: properties
    torch.cuda.get_device_capability = lambda _device=None: (major, minor)
