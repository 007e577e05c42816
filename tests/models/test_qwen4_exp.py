"""Qwen3.8-Flash-Next against transformers: hyper-connections, n-gram embeddings and attention to
what an indexer selects, in logits of whatever a prefill or an answer resumes from."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import ConfigError, UnsupportedModelError, WeightsError
from milepost.layers.ngrams import NgramPart
from milepost.models import LoadOptions, load_model
from milepost.parallel import Ranks
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, open_llm
from tests.models.resuming import (
    ALL_ACCEPTED,
    Resuming,
    answer_from_host_memory,
    answer_with_drafts,
    configure,
    refuse,
    resume_behind_drafts,
)
from tests.models.test_logits import expected_logits, random_tokens, step
from tests.models.test_mtp import build_pools
from tests.numbers import relative_error

CONFIGURATIONS = {
    "usual": {},
    "odd_sizes": {
        "eos_token_id": [3, 9],
        "head_dim": 12,
        "hc_count": 2,
        "heads_per_ngram": 1,
        "hidden_size": 40,
        "indexer_budget": 10,
        "indexer_compress_ratio": 5,
        "indexer_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "make_ngram_vocab_size_divisible_by": 5,
        "ngram_size": 4,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "output_gate_type": None,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 9,
        "ple_layer_ids": [1],
        "split_ngram_parts": 5,
    },
    "a_tensor_a_token": {"indexer_compress_ratio": 1, "indexer_budget": 7, "split_ngram_parts": 1},
    "without_ngrams": {"ple_layer_ids": []},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    changes = {"vocab_size": VOCAB_SIZE} | CONFIGURATIONS[name]
    reference = save("qwen4_exp", tmp_path, **changes)
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


@pytest.mark.parametrize(
    "changes",
    [{"indexer_budget": 1024}, {"seed": 4}, {"ple_layer_ids": [4]}, {"output_gate_type": "silu"}],
    ids=str,
)
def test_what_the_configuration_says_matters(changes, tmp_path):
    """Selection, hashes, where n-grams are added, gates: else equal logits would show nothing."""
    token_ids = random_tokens(150)
    expected = expected_logits(save("qwen4_exp", tmp_path), token_ids)
    configure(tmp_path, **changes)
    file = tmp_path / "model.safetensors"
    without = ("multipliers", "vocab_sizes", "offsets")
    kept = {name: value for name, value in load_file(file).items() if not name.endswith(without)}
    if "ple_layer_ids" in changes:
        kept = {name: value for name, value in kept.items() if ".1.ple." not in name}
        kept = first_of(kept, tmp_path)
    save_file(kept, file)
    model, _ = load_model(tmp_path)
    assert relative_error(step(model, build_pools(model), token_ids, 0, 150), expected) > 1e-3


def first_of(tensors, folder):
    """Gives the second table of n-grams, now the only one, as many rows as the first would have."""
    configure(folder, split_ngram_parts=1)
    own = [name for name in tensors if "ngram_embedding" in name]
    table = torch.cat([tensors.pop(name) for name in sorted(own)])
    path = own[0].rpartition("ngram_embedding")[0]
    rows = torch.cat((table, table))[: num_rows(folder)]
    return tensors | {f"{path}ngram_embedding.shard_0.weight": rows.contiguous()}


def num_rows(folder):
    model, _ = load_model(folder, LoadOptions(load_format="dummy"))
    (part,) = (each for each in model.modules() if isinstance(each, NgramPart))
    return len(part.table)


@pytest.mark.parametrize("word", ["full_attention", "qwen_sparse_attention", "indexed_attention"])
def test_layers_with_an_indexer_may_have_any_of_their_names(word, tmp_path):
    """Published checkpoints have the first, those that transformers has saved the second (5.17) or
    the third; quantised exports come from both."""
    token_ids = random_tokens(80)
    expected = expected_logits(save("qwen4_exp", tmp_path), token_ids)
    kinds = ["linear_attention", "linear_attention", word, "linear_attention"]
    configure(tmp_path, layer_types=kinds, full_attention_interval=3)
    model, _ = load_model(tmp_path)
    assert relative_error(step(model, build_pools(model), token_ids, 0, 80), expected) < 1e-5


def test_answers_with_drafts_are_those_without_them(tmp_path):
    """Cold, resumed at a page and inside one; the states of n-grams are recorded for drafts."""
    save("qwen4_exp", tmp_path, torch.float64, vocab_size=VOCAB_SIZE)
    wanted = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    answer_with_drafts(tmp_path, 12, method="ngram", num_speculative_tokens=3, **wanted)


def test_drafts_that_end_an_answer_are_folded_by_a_step_without_tokens(tmp_path):
    """The next turn resumes behind them, and answers as a cold run."""
    save("qwen4_exp", tmp_path, torch.float64, vocab_size=VOCAB_SIZE)
    drafting = open_llm(tmp_path, num_slots=32, speculative_config=ALL_ACCEPTED)
    resume_behind_drafts(drafting, open_llm(tmp_path, num_slots=32), max_error=1e-9)


def test_a_hit_from_host_memory_answers_as_a_cold_run(tmp_path):
    """Index keys come back with pages, and what n-grams reach back to with states."""
    save("qwen4_exp", tmp_path, torch.float64, vocab_size=VOCAB_SIZE)
    answer_from_host_memory(tmp_path)


def test_a_page_holds_index_keys_and_a_slot_what_ngrams_reach_back_to(tmp_path):
    save("qwen4_exp", tmp_path)
    llm = open_llm(tmp_path, page_size=16, num_slots=8)
    pools = llm.llm_engine.runner.executor._pools
    assert pools.all_kv.shape[1:] == (1, 3, 16, 3, 16)
    each = 2 * 3 * 3 * 48 + 2 * 4  # six inputs of three streams, digits of two ids
    assert pools.carried.states.shape[1] == 2 * each


def test_the_table_stays_in_host_memory_and_out_of_the_weights(tmp_path):
    model = save("qwen4_exp", tmp_path)
    own, _ = load_model(tmp_path)
    size = sum(each.nbytes for name, each in model.named_parameters() if "ngram" in name)
    assert own.host_bytes == size > 0
    whole = sum(each.nbytes for each in model.parameters())
    assert own.num_bytes < whole - size / 2, "but for rows that fill up projections"


def test_hashes_that_the_configuration_does_not_lead_to_are_refused(tmp_path):
    save("qwen4_exp", tmp_path)
    configure(tmp_path, seed=5)
    with pytest.raises(WeightsError, match=r"layer_multipliers has other numbers"):
        load_model(tmp_path)


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    save("qwen4_exp", tmp_path, linear_num_key_heads=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .*ple has a table"):
        load_model(tmp_path, LoadOptions(ranks=Ranks(size=2)))
    with pytest.raises(ConfigError, match=r"batch_invariant: .*indexer selects"):
        load_model(tmp_path, LoadOptions(batch_invariant=True))
    with pytest.raises(UnsupportedModelError, match="has no MTP head"):
        load_model(tmp_path, LoadOptions(head="mtp"))
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8': pages hold index keys"):
        open_llm(tmp_path, kv_cache_dtype="fp8", load_format="dummy")


@pytest.mark.parametrize(
    "changes",
    [
        {"hc_count": 1},
        {"indexer_budget": 25},
        {"indexer_compress_ratio": 0},
        {"indexer_head_dim": 64},
        {"indexer_kv_heads": 2},
        {"indexer_n_heads": None},
        {"layer_types": ["sliding_attention"] * 4},
        {"ngram_size": 9},
        {"ngram_vocab_size_base": 2**27},
        {"ple_embed_dim": 25},
        {"split_ngram_parts": 0},
    ],
    ids=str,
)
def test_settings_that_no_model_has_are_refused(changes, tmp_path):
    save("qwen4_exp", tmp_path)
    refuse(tmp_path, next(iter(changes)).replace("_types", ".type"), **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"output_gate_type": "identity"}, "output gate activation: identity"),
        ({"ple_layer_ids": [3]}, r"PLE on layers \[3\]"),
        ({"eos_token_id": None}, "eos_token_id must be set"),
    ],
)
def test_what_transformers_refuses_is_refused(changes, named, tmp_path):
    save("qwen4_exp", tmp_path)
    refuse(tmp_path, named, **changes)
