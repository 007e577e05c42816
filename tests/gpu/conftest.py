"""Runs these tests as on another chip: with `--as-chip sm_89` kernels are chosen, cut up and, for
older chips, compiled as for it (see `bench/as_chip.py`).

    python -m pytest tests/gpu --as-chip sm_89
"""

from __future__ import annotations

import pytest
import torch
from bench.as_chip import behave_as

from milepost.kernels.platform.device import CHIPS

OTHERS = [arch for arch in CHIPS if arch != "sm_90"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-chip", choices=OTHERS, help="choose and compile kernels for this chip")


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("--as-chip")
    if arch is not None and torch.cuda.is_available():
        behave_as(arch)
