"""What an engine of each family would launch compiles: a kernel that does not leaves all of the
engine on the reference kernels, with no more than a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.gpu.test_families import FAMILIES

pytest.importorskip("triton", reason="kernels are compiled by the package triton")


def compiled(chip: str, dtype: str, *families: str) -> dict[str, Any]:
    program = Path(__file__).with_name("families.py")
    return json.loads(
        forked.run_script(program, chip, dtype, *families, compiles=True).splitlines()[-1]
    )


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """From one process: to start it takes as long as to compile."""
    return compiled("sm_90", "bfloat16", "falcon_h1:gated_norm._norm_kernel", "lfm3:short_conv")


def test_mamba2_without_a_norm_compiles(found):
    """As Falcon-H1 is published."""
    assert found["falcon_h1"] == {
        "kernels": ["recurrent.portable.gated_norm._norm_kernel"],
        "refused": {},
    }


def test_short_convolutions_compile(found):
    """A constant's fields are plain numbers to the compiler, and anything to the interpreter."""
    assert found["lfm3"] == {
        "kernels": ["short_conv.triton._keep_kernel", "short_conv.triton._mix_kernel"],
        "refused": {},
    }


_CHUNK_O = "recurrent.portable.delta._chunk_fwd_o_kernel"
TOO_LARGE = {("olmo_hybrid", "sm_80", "float32"): {_CHUNK_O}}
"""States of 128 x 256 in float32 beside a chunk's tokens: 192 KiB, where an A100 has 163."""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_of_a_family_compiles(family, chip, dtype):
    refused = compiled(chip, dtype, family)[family]["refused"]
    assert set(refused) == TOO_LARGE.get((family, chip, dtype), set())
