"""Kimi Linear, KDA layers beside latent attention, against transformers: logits of whatever a
prefill or an answer resumes from."""

from __future__ import annotations

import json

import pytest
import torch

from milepost.errors import UnsupportedModelError
from milepost.models import LoadOptions, load_model
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, ask, cached, greedy, open_llm, tokens
from tests.models.resuming import Resuming

CONFIGURATIONS = {
    "plain": {},
    "groups": {
        "linear_conv_kernel_dim": 3,
        "n_group": 3,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_local_experts": 9,
        "topk_group": 2,
    },
    "odd_sizes": {
        "hidden_size": 40,
        "kv_lora_rank": 9,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_head_dim": 7,
        "linear_num_heads": 1,
        "mlp_layer_types": ["sparse", "dense"],
        "num_attention_heads": 1,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 5,
        "v_head_dim": 2,
    },
}


_LAYERS = {"kda_layers": [1, 3], "full_attn_layers": [2], "head_dim": 12, "num_heads": 3}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    reference = save("kimi_linear", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


@pytest.mark.parametrize(
    ("shared", "own", "marks", "expected"),
    [
        (100, 64, [], [0, 0, 100, 100]),
        (100, 64, [100], [0, 100, 100]),
        (400, 100, [], [0, 0, 384]),
        (700, 0, [], [0, 640]),
    ],
)
def test_hits_as_of_any_model_with_states_in_slots(shared, own, marks, expected, tmp_path):
    """Rows of the table of hits."""
    small = {"linear_head_dim": 4, "linear_num_heads": 1, "vocab_size": VOCAB_SIZE}
    save("kimi_linear", tmp_path, **small)
    llm = open_llm(tmp_path, num_pages=64, num_slots=16)
    prompts = [tokens(shared) + tokens(own, 1 + i) for i in range(len(expected))]
    outputs = [ask(llm, each, params=greedy(2), cache_marks=marks)[0] for each in prompts]
    assert cached(outputs) == expected


@pytest.mark.parametrize("layers", ["linear_attention", "full_attention"])
def test_one_kind_of_layer_alone(layers, tmp_path):
    kinds = {"layer_types": [layers] * 2, "num_hidden_layers": 2}
    reference = save("kimi_linear", tmp_path, vocab_size=VOCAB_SIZE, **kinds)
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=8)
    Resuming.beside(llm, reference).run([*range(120)], 0)


def test_a_page_holds_latents_alone(tmp_path):
    """Of one token (24 + 6) numbers, where keys and values of its six heads would be 180."""
    save("kimi_linear", tmp_path)
    llm = open_llm(tmp_path, page_size=16, num_slots=8)
    pools = llm.llm_engine.runner.executor._pools
    assert pools.all_kv.shape[1:] == (1, 1, 16, 1, 30)


def publish(folder):
    """Let the configuration be as the published one: sizes of linear attention apart, layers
    counted from one, and code beside it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    linear = {name: config.pop(old) for name, old in names.items()}
    layer_types = list(enumerate(config.pop("layer_types"), start=1))
    linear["kda_layers"] = [index for index, kind in layer_types if kind == "linear_attention"]
    linear["full_attn_layers"] = [index for index, kind in layer_types if kind == "full_attention"]
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
    config["linear_attn_config"] = linear
    config["auto_map"] = {"AutoConfig": "configuration_kimi.KimiLinearConfig"}
    config |= {
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "use_grouped_topk": True,
    }
    path.write_text(json.dumps(config))
    return config


def test_the_published_configuration_is_read_and_its_code_is_not_run(tmp_path):
    save("kimi_linear", tmp_path)
    expected, config = load_model(tmp_path)
    publish(tmp_path)
    (tmp_path / "configuration_kimi.py").write_text("raise AssertionError('it was run')")
    model, published = load_model(tmp_path)
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        assert getattr(published, name) == getattr(config, name)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def test_tensors_as_transformers_fuses_them_load_alike(tmp_path):
    model = save("kimi_linear", tmp_path)
    published, _ = load_model(tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    fused, _ = load_model(tmp_path)
    for name, parameter in published.named_parameters():
        assert torch.equal(fused.get_parameter(name), parameter)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"attn_res_block_size": 2},
        {"hidden_act": "gelu"},
        {"mla_use_nope": False},
        {"mla_use_output_gate": True},
        {"moe_layer_freq": 2},
        {"moe_router_activation_func": "softmax"},
        {"num_experts_per_token": 7},
        {"num_expert_group": 6, "topk_group": 6},
        {"num_nextn_predict_layers": 1},
        {"q_lora_rank": 8},
        {"routed_expert_hidden_size": 24},
        {"topk_group": 2},
        {"topk_method": "greedy"},
        {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
        {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [9]}},
        {"linear_attn_config": _LAYERS | {"gate_lower_bound": -5.0}},
        {"linear_attn_config": _LAYERS | {"use_full_rank_gate": True}},
        {"linear_attn_config": None},
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes, tmp_path):
    save("kimi_linear", tmp_path)
    config = publish(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModelError):
        load_model(tmp_path, LoadOptions(load_format="dummy"))


def test_dummy_weights_keep_states_in_range(tmp_path):
    save("kimi_linear", tmp_path, vocab_size=VOCAB_SIZE)
    llm = open_llm(tmp_path, load_format="dummy", num_slots=8)
    (part,) = llm.llm_engine.runner.executor.model.layers[0].blocks[0].parts
    assert (part.decay_rate < 0).all()
    assert torch.isfinite(part.decay_bias).all()
