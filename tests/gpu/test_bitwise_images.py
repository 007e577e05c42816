"""Drawn prompts with images on a GPU: in the bitwise mode each token's log-probabilities are those
of a cold run alone, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import pictured
from tests.engine.pictures.test_batch_invariant import check_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_bits(name: str, seed: int, tmp_path: Path) -> None:
    pictured.save(name, tmp_path, linear_key_head_dim=16, linear_value_head_dim=16)
    check_bits(seed, tmp_path, dtype="bfloat16", device="cuda")
