"""Numbers that no model has are refused by name, before anything is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import ConfigError, MilepostError
from milepost.models import LoadOptions, folder, load_model, names
from milepost.models.folder import read_object
from tests.models.test_names import raw_of

HUGE = 2**40


def refused(folder: Path, name: str, changes: dict[str, Any], *words: str) -> None:
    (folder / "config.json").write_text(json.dumps(raw_of(name) | changes))
    with pytest.raises(ConfigError) as failure:
        load_model(folder, LoadOptions(load_format="dummy"))
    for word in (str(folder), *words):
        assert word in str(failure.value), (word, str(failure.value))


SIZES = {
    "qwen3_next": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("max_position_embeddings", "linear_conv_kernel_dim", "moe_intermediate_size"),
        *("decoder_sparse_step", "num_experts_per_tok"),
    ),
    "nemotron_h": (
        *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        *("chunk_size", "n_group", "moe_shared_expert_intermediate_size"),
    ),
    "bamba": ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    "lfm2": ("conv_L_cache", "block_multiple_of"),
    "kimi_linear": ("kv_lora_rank", "v_head_dim", "linear_head_dim", "linear_num_heads"),
}


@pytest.mark.parametrize("value", [0, -1, HUGE, 10**30, 1.5, "16", True, [4], {}], ids=str)
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes]
)
def test_a_size_that_no_model_has_is_refused(name, size, value, tmp_path):
    refused(tmp_path, name, {size: value}, f"{size}=")


@pytest.mark.parametrize(
    ("name", "size"), [("qwen3_next", "hidden_size"), ("bamba", "mamba_d_conv")]
)
def test_a_missing_size_is_named(name, size, tmp_path):
    refused(tmp_path, name, {size: None}, size)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("qwen3_next", {"num_experts": 2**16, "num_hidden_layers": 1000}, "num_experts=65536"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 5000}, "layer_types="),
        ("nemotron_h", {"hybrid_override_pattern": "M" * 5000}, "hybrid_override_pattern="),
        ("qwen3_next", {"rms_norm_eps": float("nan")}, "rms_norm_eps="),
        ("qwen3_next", {"rms_norm_eps": -1e-6}, "rms_norm_eps="),
        ("qwen3_next", {"initializer_range": -1.0}, "initializer_range="),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers="),
        ("falcon_h1", {"ssm_multipliers": ["x"] * 5}, "ssm_multipliers="),
        ("falcon_h1", {"embedding_multiplier": float("inf")}, "embedding_multiplier="),
        ("falcon_h1", {"embedding_multiplier": 1e308}, "embedding_multiplier="),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling="),
        ("bamba", {"time_step_limit": [0.0]}, "time_step_limit="),
        ("bamba", {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit="),
        ("bamba", {"time_step_limit": [0.0, {"__float__": "Much"}]}, "__float__"),
        ("qwen3_next", {"dtype": "nn"}, "dtype='nn'"),
        ("qwen3_next", {"dtype": "float8_e4m3fn"}, "dtype="),
        ("qwen3_next", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta="),
        ("qwen3_next", {"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters.rope_theta="),
        ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 9}}, "partial_rotary_factor="),
        ("qwen3_next", {"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, "factor="),
        ("qwen3_next", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor="),
        ("qwen3_next", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ("qwen3_next", {"rope_parameters": {"rope_type": "linear", "factor": 2**20}}, "positions"),
        ("qwen3_next", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type"),
        ("qwen3_next", {"quantization_config": [1]}, "quantization_config=[1]"),
        ("qwen3_next", {"quantization_config": {"quant_method": ["fp8"]}}, "quant_method"),
        ("qwen3_next", {"per_layer_config": {"0": {"hidden_size": 4}}}, "per_layer_config"),
        ("qwen3_next", {"mlp_only_layers": ["x"] * 9, "num_experts": "6"}, "num_experts="),
        ("qwen3_next", {"model_type": ["qwen3_next"]}, "model_type=['qwen3_next']"),
        ("qwen3_next", {"num_attention_heads": 5, "num_key_value_heads": 2}, "num_attention_heads"),
    ],
    ids=str,
)
def test_other_values_that_nothing_can_be_made_of_are_refused(name, changes, word, tmp_path):
    refused(tmp_path, name, changes, word)


def test_what_transformers_would_count_to_is_not_given_to_it(tmp_path):
    """It makes a name for each label."""
    (tmp_path / "config.json").write_text(json.dumps(raw_of("qwen3_next") | {"num_labels": HUGE}))
    model, _ = load_model(tmp_path, LoadOptions(load_format="dummy"))
    assert model.num_positions == 1024


@pytest.mark.parametrize(
    "pattern", [r"re:((.|.)+)+[A-Z]$", r"re:(\w|\.|[a-z])*[A-Z]", r"re:(([a-z]|[a-z_.0-9])+)+[A-Z]"]
)
def test_an_expression_without_end_is_refused(pattern, tmp_path, monkeypatch):
    monkeypatch.setattr("milepost.models.quantization.rules._MATCH_S", 0.05)
    group = {
        "targets": ["Linear"],
        "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
        "input_activations": {"type": "float", "num_bits": 8, "dynamic": True},
    }
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    settings |= {"format": "float-quantized", "ignore": [pattern]}
    word = "takes more than 0.05 s to match"
    refused(tmp_path, "qwen3_next", {"quantization_config": settings}, word)


def test_lists_that_take_too_long_to_search_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("milepost.models.quantization._SEARCH_S", 0.0)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["x"]}
    refused(tmp_path, "qwen3_next", {"quantization_config": settings}, "to search; shorten them")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe{", "can't decode"),
        (b"[1]", "holds a list"),
        (b"3", "holds a int"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "nested more than 64 deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
        (b'{"a": 1, "a": 2}', "'a' is there twice, as 1 and 2"),
        (b'{"a": {"__float__": "Inf"}}', "__float__"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_is_no_object_is_refused(data, why, tmp_path):
    path = tmp_path / "some.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as failure:
        read_object(path)
    assert str(path) in str(failure.value)
    assert why in str(failure.value)


def test_a_byte_order_mark_changes_nothing(tmp_path):
    (tmp_path / "some.json").write_bytes(b'\xef\xbb\xbf{"a": {"__float__": "-Infinity"}}')
    assert read_object(tmp_path / "some.json") == {"a": float("-inf")}


def test_what_is_no_regular_file_is_not_opened(tmp_path, monkeypatch):
    import os

    os.mkfifo(tmp_path / "some.json")
    with pytest.raises(ConfigError, match="is no regular file"):
        read_object(tmp_path / "some.json")
    with pytest.raises(ConfigError, match="is missing"):
        read_object(tmp_path / "none.json")
    (tmp_path / "long.json").write_text("{}" + " " * 100)
    monkeypatch.setattr(folder, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="has 102 bytes, more than 100"):
        read_object(tmp_path / "long.json")


def test_whatever_is_raised_names_the_file():
    class PanicException(BaseException):
        """As libraries in Rust raise it."""

    for error in (RuntimeError("x"), ZeroDivisionError(), RecursionError(), PanicException("x")):
        with (
            pytest.raises(MilepostError, match=r"^a\.json: cannot be read \("),
            folder.reading("a.json"),
        ):
            raise error
    with pytest.raises(KeyboardInterrupt), folder.reading("a.json"):
        raise KeyboardInterrupt


def test_settings_of_every_layer_are_bounded_before_they_are_listed(tmp_path):
    changes = {"num_hidden_layers": HUGE, "layer_types": None, "full_attention_interval": 4}
    refused(tmp_path, "qwen3_next", changes, "num_hidden_layers=")
    assert names.listed_layers({"num_hidden_layers": 2}, [1], "x", "conv") == [
        "conv",
        "full_attention",
    ]
