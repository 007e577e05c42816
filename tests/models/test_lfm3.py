"""LFM3, whose sliding windows lie beside full attention with other rotary positions: logits beside
transformers', wherever they resume, and what would be ignored refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from milepost.errors import ConfigError
from milepost.models import load_config
from milepost.models.architectures.lfm3 import Lfm3OwnConfig
from milepost.tiers.holdings import MeasuredRates
from tests.checkpoints import save
from tests.engines import (
    VOCAB_SIZE,
    answer,
    ask,
    cached,
    greedy,
    metric,
    num_held,
    open_llm,
    save_tiny,
    tiering_of,
    tokens,
)
from tests.invariants import check
from tests.models.resuming import Resuming, configure, refuse

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_full_attention": {
        "layer_types": ["sliding_attention", "conv", "sliding_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 17,
        "use_attention_gate": False,
    },
    "odd_sizes": {
        "conv_L_cache": 3,
        "conv_bias": True,
        "head_dim": 12,
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "sliding_window": 1,
        "tie_word_embeddings": True,
        "use_sandwich_norm": False,
    },
    "a_window_longer_than_a_step": {"num_key_value_heads": 1, "sliding_window": 150},
    "other_positions": {
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.3,
                "factor": 2.0,
            },
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    reference = save("lfm3", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_pages=256, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


@pytest.mark.parametrize("is_whole", [True, False])
def test_its_own_configuration_is_read_as_transformers(is_whole, tmp_path, monkeypatch):
    """With all settings, and with those alone that are not the published ones."""
    if not hasattr(transformers, "Lfm3Config"):
        pytest.skip(f"transformers {transformers.__version__} has no Lfm3Config")
    path = tmp_path / "config.json"
    config = transformers.Lfm3Config(num_hidden_layers=9, hidden_size=64, sliding_window=100)
    path.write_text(config.to_json_string(use_diff=not is_whole))
    expected = load_config(tmp_path)
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "lfm3", Lfm3OwnConfig)
    found = load_config(tmp_path)
    assert type(found) is Lfm3OwnConfig
    for name, value in expected.to_dict().items():
        if name not in ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"):
            assert getattr(found, name) == value, name


@pytest.mark.parametrize("changes", [{"use_sliding_window": False}, {"sliding_window": None}])
def test_a_window_that_is_switched_off_is_full_attention(changes, tmp_path):
    reference = save("lfm3", tmp_path, vocab_size=VOCAB_SIZE, sliding_window=1024)
    configure(tmp_path, **changes)
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_pages=256)
    Resuming.beside(llm, reference).run_through_pages()


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"use_sliding_window": "no"}, "use_sliding_window='no'"),
        ({"layer_types": ["conv", "chunked_attention"] * 2 + ["conv"]}, "chunked_attention"),
        ({"rope_parameters": {"full_attention": ROPE}}, "rope_parameters.sliding_attention"),
        (
            {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_theta": -1}}},
            "rope_theta=-1",
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": ROPE,
                    "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
                }
            },
            "rope_parameters.full_attention with rope_type='yarn'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_ignored_is_refused(changes, named, tmp_path):
    save("lfm3", tmp_path)
    refuse(tmp_path, named, **changes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm3")
    return save_tiny(folder, "lfm3", torch.float64, **SMALL)


@pytest.mark.parametrize("length", [*range(38, 44), 63, 64, 65, 102, 103, 104, 105, 106])
def test_a_hit_around_the_windows_edge_changes_no_answer(tiny, length):
    """States where the window begins to leave tokens behind, and where it leaves a whole page."""
    llm = tiny.open(page_size=16, num_pages=64, num_slots=16)
    (first,) = ask(llm, tokens(length - 3), params=greedy(4))
    prompt = [*tokens(length - 3), *answer(first), *tokens(20, 1)]
    outputs = ask(llm, prompt, params=greedy(30))
    assert cached(outputs) == [length]
    tiny.check(outputs, greedy(30))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_preemption_and_eviction_change_no_answer(tiny, is_ahead):
    sizes = {"page_size": 16, "num_pages": 24, "num_slots": 5}
    llm = tiny.open(**sizes, max_num_seqs=4, async_scheduling=is_ahead)
    prompts = [tokens(60 + 7 * seed, seed) for seed in range(4)]
    for _ in range(2):
        tiny.check(ask(llm, *prompts, params=greedy(60)), greedy(60))
    assert metric(llm, "num_preemptions") > 0
    assert num_held(llm) == (0, 0)
    check(llm.llm_engine.scheduler.cache)


def test_a_long_request_takes_no_more_of_the_pages_of_windows(tiny, monkeypatch):
    llm = tiny.open(page_size=16, num_pages=80, num_slots=4, max_num_batched_tokens=64)
    pool, held = llm.llm_engine.scheduler.cache.windows, []
    take = pool.allocate

    def allocate(num):
        pages = take(num)
        held.append(pool.num_used)
        return pages

    monkeypatch.setattr(pool, "allocate", allocate)
    ask(llm, tokens(900), params=greedy(100))
    # A window's pages, those of a step that is planned, and those of the one before.
    assert max(held) <= 4 + 2 * 64 // 16 + 1
    assert pool.num_used == 0


@pytest.mark.parametrize("sizes", [(14, 4), (14, 3)])
def test_what_left_the_device_comes_back_with_its_windows(tiny, tmp_path, sizes):
    """From host memory, and in another engine from disk; a page and inside one, and where an answer
    ended."""
    options = dict(zip(("num_pages", "num_slots"), sizes, strict=True)) | {"page_size": 16}
    options |= {"cache_host_gib": 0.05, "cache_dir": str(tmp_path / "kv"), "max_num_seqs": 1}
    for source, position in (("host", 108), ("disk", 128)):
        llm = tiny.open(**options)
        tiering = tiering_of(llm.llm_engine)
        tiering.tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
        if source == "host":
            (first,) = ask(llm, tokens(100), params=greedy(9))
            for seed in range(5, 9):
                ask(llm, tokens(90, seed), params=greedy(30))
        again = ask(llm, [*tokens(100), *answer(first), *tokens(20, 1)], params=greedy(40))
        assert again[0].cache_report.loaded == {source: position}
        tiny.check(again, greedy(40))
        llm.llm_engine.close()


def test_one_memory_for_windows_too_is_refused_by_name(tiny):
    with pytest.raises(ConfigError, match="cache_memory"):
        open_llm(tiny.folder, cache_memory="shared")


def test_pools_of_windows_are_sized_by_slots(tiny):
    """Each state has room for its window, and each request for what its steps write."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 96, "cpu_cache_gib": 0.01}
    llm = tiny.open(page_size=16, cache_memory="split", **sizes)
    cache, pools = llm.llm_engine.scheduler.cache, llm.llm_engine.runner.pools
    assert cache.windows.total == 4 * cache.slots.total + 3 * 3 + 2 * 96 // 16
    taken = sum(storage.nbytes() for storage in pools.storages())
    assert 0.9 < taken / (0.01 * 2**30) < 1.01
