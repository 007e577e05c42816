"""Ling 3.0, bounded KDA beside latent attention with rotary positions and gates, against
transformers: logits of whatever a prefill or an answer resumes from; and its head."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from milepost.errors import UnsupportedModelError, WeightsError
from milepost.models import LoadOptions, load_model
from milepost.models.architectures.bailing_hybrid import ARCHITECTURES, BailingHybridConfig
from milepost.models.names import read_settings
from tests.checkpoints import build, save
from tests.engines import (
    VOCAB_SIZE,
    metric,
    open_llm,
)
from tests.ling import LIMITS, LingHead
from tests.models.resuming import (
    Resuming,
    answer_from_host_memory,
    answer_with_drafts,
    configure,
    refuse,
)
from tests.models.test_logits import expected_logits, random_tokens, step
from tests.models.test_mtp import NUM_DRAFTS, build_pools, drafted
from tests.numbers import relative_error

CONFIGURATIONS = {
    "flash": {},
    "tiny": {"q_lora_rank": 18, "short_conv_kernel_size": 3, "n_shared_experts": 2},
    "odd_sizes": {
        "first_k_dense_replace": 0,
        "head_dim": 7,
        "hidden_size": 40,
        "kda_lower_bound": -3.5,
        "kv_lora_rank": 9,
        "layer_group_size": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 1,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 2,
    },
    "unbounded": {"kda_safe_gate": False, "q_lora_rank": 5, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    changes = {"vocab_size": VOCAB_SIZE} | CONFIGURATIONS[name]
    reference = save("bailing_hybrid", tmp_path, **changes)
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_activations_matter(name, tmp_path):
    tokens = random_tokens(40)
    expected = expected_logits(save("bailing_hybrid", tmp_path), tokens)
    configure(tmp_path, **{name: None})
    model, _ = load_model(tmp_path)
    assert relative_error(step(model, build_pools(model), tokens, 0, 40), expected) > 1e-3


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 18}], ids=["flash", "tiny"])
def test_drafts_are_those_of_the_formula(changes, tmp_path):
    head = with_head(tmp_path, **changes)
    model, _ = load_model(tmp_path, LoadOptions(head="mtp"))
    token_ids = torch.randint(0, 101, (150,), generator=torch.Generator().manual_seed(1))
    hidden, logits = drafted(model, token_ids, [0, 64, 147, 148, 149])
    expected = head.logits(token_ids, hidden, NUM_DRAFTS)
    assert relative_error(logits, expected) < 1e-6, "angles are float32"
    assert expected.std() > 0.3, "flat logits would show nothing"


def test_answers_with_drafts_are_those_without_them(tmp_path):
    """Cold, and resumed at a page and inside one; all drafts are those of the head."""
    save_ling(tmp_path)
    drafting = answer_with_drafts(tmp_path, 9, method="mtp", num_speculative_tokens=2)
    assert metric(drafting, "spec_decode_num_draft_tokens") > 20


def test_a_hit_from_host_memory_answers_as_a_cold_run(tmp_path):
    """Latents, states and convolutions come back as they left."""
    save_ling(tmp_path)
    answer_from_host_memory(tmp_path)


def save_ling(folder):
    """With a head, in float64, where tokens are the same however they are computed."""
    with_head(folder, vocab_size=VOCAB_SIZE)


def test_first_row_would_show(tmp_path):
    """The row that has no hidden state before it is not attended to: else drafts are others."""
    head = with_head(tmp_path)
    model, _ = load_model(tmp_path, LoadOptions(head="mtp"))
    token_ids = torch.arange(40)
    attention = model.mtp.attention
    attention.operation = replace(attention.operation, first_row=0)
    hidden, logits = drafted(model, token_ids, [0, 39])
    expected = head.logits(token_ids, hidden, NUM_DRAFTS)
    assert relative_error(logits[:1], expected[:1]) > 1e-3


def test_a_head_is_left_out_unless_it_is_asked_for(tmp_path):
    with_head(tmp_path)
    assert load_model(tmp_path)[0].mtp is None
    assert load_model(tmp_path, LoadOptions(head="auto"))[0].mtp is not None
    save("bailing_hybrid", tmp_path)
    with pytest.raises(WeightsError, match=r"model\.layers\.5\..* is missing"):
        load_model(tmp_path, LoadOptions(head="mtp"))
    configure(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModelError, match="num_nextn_predict_layers=0"):
        load_model(tmp_path, LoadOptions(head="mtp"))


def with_head(folder, **changes):
    model = save("bailing_hybrid", folder, torch.float64, **changes)
    single = {"num_hidden_layers": 1, "layer_group_size": 1, "first_k_dense_replace": 0}
    single |= dict.fromkeys(LIMITS, ())
    return LingHead(folder, model, build("bailing_hybrid", torch.float64, **single | changes))


def test_a_page_holds_latents_alone(tmp_path):
    """Of one token (24 + 6) numbers, where keys and values of its six heads would be 180."""
    save("bailing_hybrid", tmp_path)
    llm = open_llm(tmp_path, page_size=16, num_slots=8)
    pools = llm.llm_engine.runner.executor._pools
    assert pools.all_kv.shape[1:] == (3, 1, 16, 1, 30)


def test_the_configuration_without_transformers_own_builds_the_same_model(tmp_path):
    """For releases that have no class: what is read of the settings is all there."""
    save("bailing_hybrid", tmp_path)
    expected, config = load_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    settings = read_settings(raw, {}, ARCHITECTURES[0], BailingHybridConfig)
    older = BailingHybridConfig.from_dict(settings)
    outline = ARCHITECTURES[0].decoder(older, expected.scope.root(), is_tied=False, has_head=True)
    ours = ARCHITECTURES[0].decoder(config, expected.scope.root(), is_tied=False, has_head=True)
    shapes = {name: each.shape for name, each in ours.named_parameters()}
    assert {name: each.shape for name, each in outline.named_parameters()} == shapes
    assert outline.operations == ours.operations
    assert outline.num_positions == ours.num_positions


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"group_norm_size": 4},
        {"hidden_act": "gelu"},
        {"kda_lower_bound": None},
        {"kda_lower_bound": 0.0},
        {"layer_group_size": 0},
        {"layer_types": ["linear_attention"] * 5},
        {"linear_silu": False},
        {"moe_router_enable_expert_bias": False},
        {"mtp_use_kda": True},
        {"n_group": 2},
        {"no_kda_lora": False},
        {"num_experts_per_tok": 7},
        {"rope_interleave": False},
        {"router_dtype": "bf16"},
        {"score_function": "softmax"},
        {"topk_method": "greedy"},
        {"use_bias": True},
        {"use_mla_nope": True},
        {"use_nGPT": True},
        {"use_qk_norm": False},
        {"value_norm": True},
        {"expert_swiglu_limit_list": 4},
        {"share_expert_swiglu_limit_list": [-1.0] * 5},
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes, tmp_path):
    save("bailing_hybrid", tmp_path)
    refuse(tmp_path, next(iter(changes)), **changes)


def test_dummy_weights_keep_states_in_range(tmp_path):
    save("bailing_hybrid", tmp_path, vocab_size=VOCAB_SIZE)
    llm = open_llm(tmp_path, load_format="dummy", num_slots=8)
    (part,) = llm.llm_engine.runner.executor.model.layers[0].blocks[0].parts
    assert (part.decay_rate < 0).all()
    assert torch.isfinite(part.decay_bias).all()
