"""The fused kernels of latent attention on a GPU at real shapes, against the reference."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.kernels.mla_cases import Case, run
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REAL = {"heads": 32, "latent": 512, "shared": 64, "page_size": 64}
CASES = {
    "decode": Case(starts=(5000,), lengths=(1,), num_decodes=1, **REAL),
    "decodes": Case(
        starts=tuple(range(3, 2003, 50)), lengths=(1,) * 40, num_decodes=40, padding=3, **REAL
    ),
    "prefill": Case(starts=(0, 700), lengths=(900, 130), **REAL),
    "mixed": Case(starts=(130, 20, 5), lengths=(1, 300, 2), num_decodes=1, padding=4, **REAL),
    "odd": Case(starts=(130, 20, 5), lengths=(1, 30, 2), num_decodes=1),
}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_matches_the_reference(name: str, dtype: torch.dtype) -> None:
    chip = probe(torch.device("cuda", 0))
    expected = run(CASES[name], None, torch.float32, "cuda")
    output = run(CASES[name], chip, dtype, "cuda")
    assert relative_error(output.float(), expected) < TOLERANCES[dtype]
