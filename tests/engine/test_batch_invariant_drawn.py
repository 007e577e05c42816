"""The bitwise mode with all features together, drawn: each token's log-probabilities are those of a
cold run alone, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.drawing import WITH_HEAD, run
from tests.engines import save_tiny
from tests.mtp import add_head

CASES = [
    ("qwen3_5", "float32", 3),
    ("qwen3_5", "bfloat16", 0),
    ("nemotron_h", "bfloat16", 1),
    ("kimi_linear", "float32", 2),
]
"""Gated DeltaNet, Mamba2 and KDA; the last is the seed."""
OTHERS = ["qwen3_next", "lfm2_moe", "lfm3", "bamba", "falcon_h1", "granitemoehybrid", "olmo_hybrid"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, tokenizer):
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp(family)
            save_tiny(folder, family, torch.float32, vocab_size=len(tokenizer))
            tokenizer.save_pretrained(folder)
            if family in WITH_HEAD:
                add_head(folder)
        return folders[family]

    return find


@pytest.mark.parametrize(("family", "dtype", "seed"), CASES)
def test_bits(family, dtype, seed, folder_of, tmp_path, monkeypatch):
    modes = {"batch_invariant": True, "dtype": dtype}
    run(seed, folder_of(family), family, tmp_path, monkeypatch, num_requests=8, **modes)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*dict.fromkeys(family for family, *_ in CASES), *OTHERS])
def test_many_bits(family, dtype, seed, folder_of, tmp_path, monkeypatch):
    modes = {"batch_invariant": True, "dtype": dtype}
    run(seed, folder_of(family), family, tmp_path, monkeypatch, num_requests=30, **modes)
