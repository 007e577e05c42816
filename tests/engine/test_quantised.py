"""Quantised weights beside all else: an MTP head that drafts, KV in float8, host memory and files.
What comes back answers as a cold engine does that has nothing but the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost import LLM
from milepost.tiers.holdings import MeasuredRates
from tests.engine.test_tiers import follow_up
from tests.engines import (
    NUM_TOKENS,
    THREE_LAYERS,
    VOCAB_SIZE,
    answer,
    ask,
    open_llm,
    tiering_of,
    tokens,
)
from tests.quantised import EXPERTS, write

_SMALL = THREE_LAYERS | {"vocab_size": VOCAB_SIZE}
END = 200 + NUM_TOKENS - 1


def opened(folder: Path, **options: object) -> LLM:
    sizes = {"num_pages": 32, "num_slots": 8, "max_num_seqs": 4, "dtype": "float64"}
    llm = open_llm(folder, **{**sizes, **options})
    if tiering_of(llm.llm_engine) is not None:  # nothing is worth computing
        tiering_of(llm.llm_engine).tiers.holdings.rates = MeasuredRates(
            tokens_per_s=1.0, load_s=0.0
        )
    return llm


@pytest.mark.parametrize(
    ("name", "form", "sizes", "kv"),
    [
        ("qwen3_next", "fp8-blocks", EXPERTS, "fp8"),
        ("qwen3_next", "int8-channels", EXPERTS, "auto"),
        ("qwen3_5", "awq", {}, "auto"),
        ("qwen3_5_moe", "modelopt-mixed", EXPERTS, "fp8"),
    ],
    ids=["experts in fp8", "experts in int8", "four bits", "experts in e2m1 beside fp8"],
)
def test_together(name: str, form: str, sizes: dict[str, int], kv: str, tmp_path: Path) -> None:
    stored, _ = write(name, tmp_path, form, has_head=True, **_SMALL, **sizes)
    alone = opened(stored, kv_cache_dtype=kv, enable_prefix_caching=False)
    everything = {
        "kv_cache_dtype": kv,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "cache_host_gib": 0.05,
        "cache_dir": str(tmp_path / "cache"),
    }
    llm = opened(stored, **everything)
    prompts = tokens(200), [*tokens(130), *tokens(60, seed=3)]
    outputs = ask(llm, *prompts)
    again = follow_up(outputs[0])
    outputs += ask(llm, again)
    assert llm.llm_engine.scheduler.cache.reset()
    outputs += ask(llm, again)
    llm.llm_engine.close()
    outputs += ask(opened(stored, **everything), again)
    # Two pages are shared: whichever prompt begins second hits them.
    assert sorted(each.num_cached_tokens for each in outputs[:2]) == [0, 128]
    found = [(each.num_cached_tokens, *each.cache_report.loaded) for each in outputs[2:]]
    assert found == [(END,), (END, "host"), (END, "disk")]
    expected = ask(alone, *prompts, again)
    wanted = [answer(each) for each in (*expected[:2], *[expected[2]] * 3)]
    assert [answer(each) for each in outputs] == wanted
