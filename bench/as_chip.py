"""Runs a script on this GPU as on another chip.

    python bench/as_chip.py sm_89 bench/engine.py --only decode --option hopper_kernels=false

Kernels are chosen and cut up as for the other chip, whose shared memory limits them. If it is an
NVIDIA chip older than this GPU, they are also compiled from its instructions: a 4090's matrix
products are `mma` on a Hopper too, not `wgmma`. Everything else is this GPU's: its units, memory
and clocks.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from milepost.kernels.platform import device
from milepost.kernels.platform.device import CHIPS, Chip, find_chip


def behave_as(arch: str) -> None:
    """Makes this process take its GPU for the chip `arch`, until it ends. Call it before a kernel
    is compiled. Raises ConfigError if the chip is unknown."""
    chip = find_chip(arch)
    mock.patch.object(device, "torch", _Torch(chip)).start()
    if not chip.is_amd and chip.capability < torch.cuda.get_device_capability():
        from triton import knobs

        knobs.runtime.override_arch = chip.arch.replace("_", "")


class _Torch:
    """torch, as `device.probe` sees it, on another chip."""

    def __init__(self, chip: Chip) -> None:
        properties = torch.cuda.get_device_properties(0)
        said = SimpleNamespace(
            multi_processor_count=properties.multi_processor_count,
            shared_memory_per_block_optin=chip.shared_bytes,
            gcnArchName=chip.arch,
        )
        self.cuda = SimpleNamespace(
            get_device_properties=lambda _device: said,
            get_device_capability=lambda _device: chip.capability,
            is_available=torch.cuda.is_available,
        )
        self.version = SimpleNamespace(hip="7.0" if chip.is_amd else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="given to the script")
    given = parser.parse_args()
    behave_as(given.chip)
    sys.argv = [str(given.script), *given.arguments]
    sys.path.insert(0, str(given.script.parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
