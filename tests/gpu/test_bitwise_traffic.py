"""Drawn traffic with all features together on a GPU: in the bitwise mode each token's
log-probabilities are those of a cold run alone, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from milepost.engine.assembly import sizing
from tests import quantised
from tests.engine.drawing import WITH_HEAD, run
from tests.engines import save_tiny
from tests.gpu.test_batch_invariant import MODELS, WIDE
from tests.mtp import add_head
from tests.small_tokenizer import train_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FOUR_BITS = "experts in four bits"
NAMES = [name for name in (*MODELS, FOUR_BITS) if name != "FP8 pages"]
"""The draw decides on FP8 pages."""


def save(folder: Path, name: str) -> tuple[Path, str]:
    """Saves a model of this name with a tokenizer, and a head for drafts if its family has one;
    returns its folder and family."""
    tokenizer = train_tokenizer()
    if name == FOUR_BITS:
        family = "qwen3_next"
        sizes = WIDE | {"vocab_size": len(tokenizer)}
        folder, _ = quantised.write(family, folder, "awq", has_head=True, **sizes)
    else:
        family, sizes, _ = MODELS[name]
        save_tiny(folder, family, torch.float32, **sizes, vocab_size=len(tokenizer))
        if family in WITH_HEAD:
            add_head(folder)
    tokenizer.save_pretrained(folder)
    return folder, family


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, family = save(tmp_path / "model", name)
    # Where the draw leaves pages and states to memory: little of it, so that much is evicted.
    monkeypatch.setattr(sizing, "free_bytes", lambda *_, **__: 64 << 20)
    options = {} if name == FOUR_BITS else MODELS[name][2]
    modes = {"batch_invariant": True, "dtype": "bfloat16", "device": "cuda", **options}
    kept = tmp_path / "kept"
    asked = run(seed, folder, family, kept, monkeypatch, num_requests=24, **modes)
    assert len(asked) > 12
