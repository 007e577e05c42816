"""All features together, drawn: each answer is what a plain engine answers to its prompt alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost import LLM
from milepost.tiers.rates import MeasuredRates
from tests.checkpoints import CHECKPOINTS
from tests.engine.drawing import WITH_HEAD, Traffic, differences, engine_options
from tests.engines import save_tiny, tiering_of
from tests.mtp import add_head

FAMILIES = ["qwen3_5", "qwen3_next", "nemotron_h", "kimi_linear", "lfm2_moe"]
OTHERS = ["olmo_hybrid", "bamba", "granitemoehybrid", "falcon_h1", "lfm2", "qwen3_5_moe"]
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


def opened(folder: Path, options: dict[str, Any]) -> LLM:
    llm = LLM(folder, **options)
    tiering = tiering_of(llm.llm_engine)
    if tiering is not None:
        # Nothing is worth computing.
        tiering.tiers.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
    return llm


def end(llm: LLM) -> None:
    """Nothing is held by anybody once all is over."""
    engine = llm.llm_engine
    engine.close()
    tiering = tiering_of(engine)
    if tiering is not None:
        assert not tiering.copier.is_busy
        assert not engine.scheduler.num_loading
        assert not tiering.tiers.loads._loads
        if not tiering.tiers.holdings.disk_rests:
            tiers = tiering.tiers.host, tiering.tiers.disk
            assert not any(item.pins for tier in tiers for item in tier)


def run(
    seed: int, folder: Path, family: str, kept: Path, monkeypatch: Any, *, num_requests: int
) -> None:
    """Some requests, then others that find what is below the device's memory alone."""
    rng = random.Random(seed)
    options = engine_options(rng, family, kept)
    llm = opened(folder, options)
    first = Traffic(rng, llm, num_requests=num_requests // 2)
    asked = first.run()
    if "cache_dir" in options and rng.random() < 0.7:
        end(llm)
        llm = opened(folder, options)
        if rng.random() < 0.3:  # what has not come at the first look is computed
            monkeypatch.setattr("milepost.tiers.disk.STALL_S", -1.0)
    else:
        assert llm.llm_engine.scheduler.cache.reset()
    asked += Traffic(rng, llm, num_requests - num_requests // 2, first.known).run()
    end(llm)
    monkeypatch.undo()
    same: dict[str, Any] = {"kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    plain = LLM(
        folder,
        enable_prefix_caching=False,
        max_num_seqs=1,
        num_pages=64,
        num_slots=4,
        max_model_len=options["max_model_len"],
        **same,
    )
    for each in asked:
        wrong = differences(each, plain)
        assert not wrong, f"{options}, {each.prompt}, {each.params}: {wrong}"
    assert len(asked) > num_requests // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_answers(family, folder_of, tmp_path, monkeypatch):
    seed = FAMILIES.index(family)
    run(seed, folder_of(family), family, tmp_path, monkeypatch, num_requests=12)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_many_answers(seed, family, folder_of, tmp_path, monkeypatch):
    run(seed, folder_of(family), family, tmp_path, monkeypatch, num_requests=30)
