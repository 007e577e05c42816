"""The fused kernels of latent attention, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.kernels.attention import LatentOperation
from milepost.kernels.platform.device import probe
from tests.batches import Part, build_batch
from tests.kernels.mla_cases import Case, run
from tests.numbers import relative_error

CHIP = replace(probe(torch.device("cpu")), num_sms=6)
CASES = {
    "decodes": Case(starts=(0, 300, 40), lengths=(1, 1, 1), num_decodes=3),
    "one_head": Case(starts=(200,), lengths=(1,), num_decodes=1, heads=1, latent=9, shared=5),
    "prefill": Case(starts=(0, 150), lengths=(9, 4), heads=20, page_size=8),
    "mixed": Case(starts=(130, 20, 5), lengths=(1, 30, 2), num_decodes=1, padding=4),
    "turned": Case(starts=(130, 5), lengths=(1, 9), num_decodes=1, heads=11, shared=6, turns=True),
}


@pytest.mark.parametrize("name", CASES)
def test_it_matches_the_reference(name: str) -> None:
    """Ranges of long sequences are cut, and combined; what lies past a sequence's end is NaN."""
    case = CASES[name]
    expected = run(case, None, torch.float32)
    assert relative_error(run(case, CHIP, torch.float32), expected) < 5e-6


@pytest.mark.parametrize("name", ["one_head", "mixed", "turned"])
def test_latents_in_float8(name: str) -> None:
    case = replace(CASES[name], has_float8=True)
    expected = run(case, None, torch.float32)
    assert relative_error(run(case, CHIP, torch.float32), expected) < 5e-6


def test_half_precision() -> None:
    case = CASES["mixed"]
    expected = run(case, None, torch.float32)
    output = run(case, CHIP, torch.float16)
    assert output.dtype == torch.float16
    assert relative_error(output.float(), expected) < 5e-3


def test_too_many_heads_run_on_the_reference() -> None:
    sizes = {"latent_dim": 512, "shared_dim": 64}
    assert LatentOperation(num_heads=64, **sizes).why_reference(CHIP) == ""
    assert "heads" in LatentOperation(num_heads=65, **sizes).why_reference(CHIP)


@pytest.mark.parametrize(
    ("shared_kib", "value_bytes", "wide_rows"),
    [(227, 2, 64), (227, 4, 64), (163, 2, 64), (163, 4, 32), (99, 2, 32)],
)
def test_tiles_are_as_wide_as_a_chip_has_room(shared_kib, value_bytes, wide_rows):
    """At Kimi Linear's sizes. In float32 an A100 has not the 180 KiB for 64 rows."""
    sizes = {"num_heads": 32, "latent_dim": 512, "shared_dim": 64}
    part = Part(pages=[1, 2], start=0, length=40, slot_in=0, slot_out=1)
    batch = build_batch([part], 32, 32)
    chip = replace(CHIP, shared_bytes=shared_kib << 10)
    layout = LatentOperation(**sizes, value_bytes=value_bytes).lay_out(replace(batch, chip=chip))
    assert layout.tiling.shapes.wide_rows == wide_rows
