"""All features together, drawn: each answer is what a plain engine answers to its prompt alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import CHECKPOINTS
from tests.engine.drawing import WITH_HEAD, run
from tests.engines import save_tiny
from tests.mtp import add_head

FAMILIES = ["qwen3_5", "qwen3_next", "nemotron_h", "kimi_linear", "lfm2_moe"]
OTHERS = ["olmo_hybrid", "bamba", "granitemoehybrid", "falcon_h1", "lfm2", "lfm3", "qwen3_5_moe"]
OTHERS += ["bailing_hybrid"]
assert CHECKPOINTS.keys() >= {*FAMILIES, *OTHERS}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, tokenizer):
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            save_tiny(folder, family, torch.float64, vocab_size=len(tokenizer))
            tokenizer.save_pretrained(folder)
            if family in WITH_HEAD:
                add_head(folder)
            folders[family] = folder
        return folders[family]

    return find


@pytest.mark.parametrize("family", FAMILIES)
def test_answers(family, folder_of, tmp_path, monkeypatch):
    seed = FAMILIES.index(family)
    run(seed, folder_of(family), family, tmp_path, monkeypatch, num_requests=12)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_many_answers(seed, family, folder_of, tmp_path, monkeypatch):
    run(seed, folder_of(family), family, tmp_path, monkeypatch, num_requests=30)
