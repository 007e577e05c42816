"""A setting is one, whatever a file or an override calls it: beside transformers' own reading."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.layers.rotary import num_positions
from milepost.models import load_config
from milepost.models.registry import known
from tests import checkpoints

Raw = dict[str, Any]

WITH_ROTARY = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "bamba", "falcon_h1", "granitemoehybrid"),
    *("lfm2", "lfm2_moe", "olmo_hybrid"),
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


@cache
def _saved(name: str) -> str:
    return checkpoints.build(name).config.to_json_string(use_diff=False)


def raw_of(name: str) -> Raw:
    """`config.json` as transformers saves it."""
    raw: Raw = json.loads(_saved(name))
    return raw


def read(folder: Path, raw: Raw, **overrides: Any) -> Any:
    """The text part, as it is read of a file."""
    (folder / "config.json").write_text(json.dumps(raw))
    given = EngineConfig(hf_overrides=overrides or None).overrides
    return load_config(folder, given).get_text_config()


def theirs(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder).get_text_config()


def refused(folder: Path, raw: Raw, *words: str, **overrides: Any) -> None:
    with pytest.raises(ConfigError) as failure:
        read(folder, raw, **overrides)
    for word in (*words, *([] if overrides else [str(folder / "config.json")])):
        assert word in str(failure.value), (word, str(failure.value))


def without(raw: Raw, *names: str) -> Raw:
    return {name: value for name, value in raw.items() if name not in names}


LEGACY = {
    "theta": {"rope_theta": 5000.0},
    "scaling": {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "null": {"rope_theta": 5000.0, "rope_scaling": None},
    "new": {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 7000.0}},
    "share": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("spelling", LEGACY)
@pytest.mark.parametrize("name", WITH_ROTARY)
def test_rotary_positions_are_read_as_transformers_reads_them(name, spelling, tmp_path):
    raw = without(raw_of(name), "rope_parameters") | LEGACY[spelling]
    own = read(tmp_path, raw)
    assert own.rope_parameters == without(theirs(tmp_path).rope_parameters, "type")


@pytest.mark.parametrize("name", WITH_ROTARY)
def test_rotary_positions_are_overridden_under_any_name(name, tmp_path):
    """And neighbours stay as they are."""
    raw = raw_of(name)
    before = read(tmp_path, raw).rope_parameters
    flat = read(tmp_path, raw, rope_theta=5000.0).rope_parameters
    assert flat == before | {"rope_theta": 5000.0}
    assert read(tmp_path, raw, rope_parameters={"rope_theta": 5000.0}).rope_parameters == flat
    stretched = read(tmp_path, raw, rope_scaling={"type": "yarn", **YARN})
    assert stretched.rope_parameters == before | {"rope_type": "yarn", **YARN}
    assert num_positions(stretched) == 1024
    again = read(tmp_path, raw, rope_parameters={"rope_type": "yarn", **YARN})
    assert again.rope_parameters == stretched.rope_parameters
    old = without(raw, "rope_parameters") | {"rope_theta": 300.0, "rope_scaling": None}
    assert read(tmp_path, old, rope_scaling=YARN | {"type": "yarn"}).rope_parameters == {
        **before,
        **YARN,
        "rope_type": "yarn",
        "rope_theta": 300.0,
    }
    assert read(tmp_path, old, rope_scaling=None).rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 3.0}, ("rope_parameters.rope_theta=", "rope_theta=3.0")),
        ({"rope_scaling": {"type": "yarn", **YARN}}, ("rope_type='default'", "rope_scaling.type")),
        (
            {"dtype": "float32", "torch_dtype": "bfloat16"},
            ("dtype='float32'", "torch_dtype='bfloat16'"),
        ),
        ({"full_attention_interval": 2}, ("layer_types", "full_attention_interval=2")),
        ({"num_hidden_layers": 3}, ("layer_types has 4", "num_hidden_layers=3")),
        ({"rope_parameters": [1]}, ("rope_parameters=[1]",)),
    ],
    ids=str,
)
def test_a_setting_with_two_values_is_refused(changes, words, tmp_path):
    raw = raw_of("qwen3_next")
    assert read(tmp_path, raw | {"rope_theta": raw["rope_parameters"]["rope_theta"]})
    refused(tmp_path, raw | changes, *words)


def test_a_key_that_is_there_twice_is_refused_unless_it_says_the_same(tmp_path):
    text = _saved("qwen3_next").strip().removesuffix("}")
    (tmp_path / "config.json").write_text(text + ', "hidden_size": 48}')
    assert load_config(tmp_path).hidden_size == 48
    (tmp_path / "config.json").write_text(text + ', "hidden_size": 96}')
    with pytest.raises(ConfigError, match="'hidden_size' is there twice, as 48 and 96"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_infinity_as_transformers_writes_it_stays_beside_overrides(name, tmp_path):
    raw = raw_of(name)
    assert raw["time_step_limit"][1] == {"__float__": "Infinity"}
    assert tuple(read(tmp_path, raw).time_step_limit) == (0.0, math.inf)
    found = read(tmp_path, raw, max_position_embeddings=77)
    assert (tuple(found.time_step_limit), found.max_position_embeddings) == ((0.0, math.inf), 77)
    given = read(tmp_path, raw, time_step_limit=[0.5, math.inf])
    assert tuple(given.time_step_limit) == (0.5, math.inf)
    assert EngineConfig(hf_overrides='{"time_step_limit": [0.5, Infinity]}').overrides == {
        "time_step_limit": [0.5, math.inf]
    }


@pytest.mark.parametrize("name", ["qwen3_5_multimodal", "qwen3_5_moe_multimodal"])
def test_a_flat_file_of_the_outer_type_is_the_text_model(name, tmp_path):
    raw = raw_of(name)
    nested = read(tmp_path, raw)
    flat = without(raw, "text_config") | without(raw["text_config"], "model_type")
    assert read(tmp_path, flat).to_dict() == nested.to_dict()
    refused(tmp_path, without(raw, "text_config"), "text_config is missing")
    assert read(tmp_path, raw | {"hidden_size": raw["text_config"]["hidden_size"]})
    refused(tmp_path, raw | {"hidden_size": 96}, "hidden_size=96", "text_config.hidden_size=48")
    refused(tmp_path, raw | {"text_config": [1]}, "text_config=[1]")
    other = raw["text_config"] | {"model_type": "qwen3_next"}
    refused(tmp_path, raw | {"text_config": other}, "text_config.model_type='qwen3_next'")
    refused(tmp_path, raw, "no rope_theta", "stand in text_config", rope_theta=3.0)
    assert read(tmp_path, raw, text_config={"rope_theta": 3.0}).rope_parameters["rope_theta"] == 3.0


def test_a_tied_head_may_be_said_by_the_text_part_alone(tmp_path):
    raw = without(raw_of("qwen3_5_multimodal"), "tie_word_embeddings")
    raw["text_config"]["tie_word_embeddings"] = True
    read(tmp_path, raw)
    assert load_config(tmp_path).tie_word_embeddings is True


def test_dense_layers_with_experts_are_another_model(tmp_path):
    refused(tmp_path, raw_of("qwen3_5") | {"num_experts": 8}, "num_experts=8", "qwen3_5_moe")


def test_layers_by_a_rule_or_a_list(tmp_path):
    raw = raw_of("qwen3_next")
    by_rule = read(tmp_path, without(raw, "layer_types") | {"full_attention_interval": 2})
    assert by_rule.layer_types == theirs(tmp_path).layer_types
    assert read(tmp_path, raw, full_attention_interval=2).layer_types == by_rule.layer_types
    refused(tmp_path, raw, "full_attention_interval=0", full_attention_interval=0)


def test_layers_of_nemotron_h(tmp_path):
    raw = raw_of("nemotron_h")
    own = read(tmp_path, raw).layers_block_type
    published = without(raw, "layers_block_type") | {"hybrid_override_pattern": "ME*-ME"}
    assert read(tmp_path, published).layers_block_type == own == theirs(tmp_path).layers_block_type
    assert read(tmp_path, raw | {"hybrid_override_pattern": "ME*-ME"}).layers_block_type == own
    refused(tmp_path, raw | {"hybrid_override_pattern": "MMMMMM"}, "hybrid_override_pattern=")
    refused(tmp_path, published | {"hybrid_override_pattern": "ME|-ME"}, "has '|'")
    refused(tmp_path, published, "num_hidden_layers=3", num_hidden_layers=3)
    changes = {"hybrid_override_pattern": "M*", "num_hidden_layers": 2}
    for file in (raw, published):
        found = read(tmp_path, file, **changes)
        assert found.layers_block_type == ["linear_attention", "full_attention"]
    older = without(raw, "n_groups", "conv_kernel", "chunk_size")
    older |= {"mamba_n_groups": raw["n_groups"], "mamba_d_conv": 4, "mamba_chunk_size": 32}
    found = read(tmp_path, older)
    assert (found.chunk_size, found.n_groups) == (32, theirs(tmp_path).n_groups)
    refused(tmp_path, raw | {"mamba_chunk_size": 7}, "chunk_size=64", "mamba_chunk_size=7")
    assert read(tmp_path, raw, mamba_chunk_size=32).chunk_size == 32


def test_layers_and_sizes_of_lfm2(tmp_path):
    raw = raw_of("lfm2")
    by_index = without(raw, "layer_types") | {"full_attn_idxs": [1, 3]}
    found = read(tmp_path, by_index)
    assert found.layer_types == theirs(tmp_path).layer_types
    assert read(tmp_path, raw, full_attn_idxs=[1, 3]).layer_types == found.layer_types
    refused(tmp_path, by_index | {"full_attn_idxs": [9]}, "full_attn_idxs has 9")
    # As the published 1.2B: the size before it is adjusted, and the one that comes of it.
    published = raw | {"block_ff_dim": 12288, "intermediate_size": 8192}
    published |= {"block_auto_adjust_ff_dim": True, "conv_dim": 48, "block_norm_eps": 1e-5}
    assert (
        read(tmp_path, published).intermediate_size == theirs(tmp_path).intermediate_size == 12288
    )
    refused(tmp_path, published | {"intermediate_size": 64}, "block_ff_dim=12288")
    assert read(tmp_path, published, intermediate_size=96).intermediate_size == 96
    refused(tmp_path, raw | {"conv_dim": 64}, "conv_dim=48", "hidden_size=64")
    tied = without(raw, "tie_word_embeddings") | {"tie_embedding": True}
    assert read(tmp_path, tied).tie_word_embeddings is theirs(tmp_path).tie_word_embeddings is True
    assert read(tmp_path, tied, tie_word_embeddings=False).tie_word_embeddings is False


def test_lfm2_with_experts_says_which_layers_have_attention(tmp_path):
    raw = raw_of("lfm2_moe")
    refused(tmp_path, without(raw, "layer_types"), "layer_types is missing")
    refused(tmp_path, raw | {"layer_types": None}, "layer_types is missing")
    found = read(tmp_path, without(raw, "layer_types") | {"full_attn_idxs": [1]})
    assert found.layer_types == raw["layer_types"]


def test_layers_of_bamba_granite_and_falcon(tmp_path):
    raw = raw_of("bamba")
    listed = without(raw, "attn_layer_indices")
    listed["layers_block_type"] = ["mamba", "attention", "mamba"]
    assert read(tmp_path, listed).attn_layer_indices == [1]
    refused(tmp_path, raw | {"layer_types": ["attention"] * 3}, "attn_layer_indices=[1]")
    refused(tmp_path, raw, "0.5, half of a head", partial_rotary_factor=1.0)
    raw = raw_of("granitemoehybrid")
    renamed = without(raw, "layer_types") | {"layers_block_type": ["mamba", "mamba", "attention"]}
    assert read(tmp_path, renamed).layer_types == theirs(tmp_path).layer_types
    refused(tmp_path, raw | {"layers_block_type": ["mamba"] * 3}, "layers_block_type=")
    raw = raw_of("falcon_h1")
    assert read(tmp_path, raw | {"layers_block_type": ["hybrid"] * 2})
    refused(tmp_path, raw | {"layers_block_type": ["mamba"] * 2}, "layers_block_type=")


def test_sizes_of_kimi_linear_are_overridden_flat_and_nested(tmp_path):
    raw = raw_of("kimi_linear")
    linear = {"head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 4}
    linear |= {"kda_layers": [1, 3], "full_attn_layers": [2]}
    names = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types")
    published = without(raw, *names) | {"linear_attn_config": linear}
    own = read(tmp_path, published)
    for name in names:
        assert getattr(own, name) == getattr(theirs(tmp_path), name), name
    for overrides in ({"linear_head_dim": 8}, {"linear_attn_config": {"head_dim": 8}}):
        for file in (raw, published):
            if file is raw and "linear_attn_config" in overrides:
                continue
            found = read(tmp_path, file, **overrides)
            assert (found.linear_head_dim, found.linear_num_heads) == (8, 3)
            assert found.layer_types == own.layer_types
    refused(tmp_path, raw | {"linear_attn_config": {"head_dim": 8}}, "linear_head_dim=12")
    experts = {"num_experts": 6, "num_local_experts": 9}
    refused(tmp_path, raw | experts, "num_local_experts=9", "num_experts=6")
    assert read(tmp_path, raw, num_experts=8).num_local_experts == 8
    length = without(raw, "max_position_embeddings") | {"model_max_length": 4096}
    assert num_positions(read(tmp_path, length)) == theirs(tmp_path).max_position_embeddings == 4096


def test_a_head_is_named_once(tmp_path):
    raw = raw_of("qwen3_5") | {"mtp_num_hidden_layers": 1}
    assert read(tmp_path, raw | {"num_nextn_predict_layers": 1})
    refused(tmp_path, raw | {"num_nextn_predict_layers": 2}, "mtp_num_hidden_layers=1")


@pytest.mark.parametrize(
    ("changes", "is_run"),
    [
        ({"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 2}, True),
        ({"sliding_window": None, "use_sliding_window": False}, True),
        ({"sliding_window": 1024}, True),
        ({"sliding_window": 1023}, False),
        ({"sliding_window": 128}, False),
        ({"sliding_window": 128, "use_sliding_window": "false"}, False),
        ({"sliding_window": 128, "use_sliding_window": None}, False),
        ({"attention_chunk_size": 2048}, True),
        ({"attention_chunk_size": 512, "use_sliding_window": False}, False),
    ],
    ids=str,
)
def test_a_window_that_changes_nothing_is_taken(changes, is_run, tmp_path):
    raw = raw_of("qwen3_next") | changes
    if is_run:
        assert read(tmp_path, raw)
    else:
        refused(tmp_path, raw, "is not supported")


def test_an_override_of_what_nothing_reads_is_refused(tmp_path):
    raw = raw_of("qwen3_next")
    for name in ("rope_thetas", "to_dict", "hybrid_override_pattern", "model_type"):
        refused(tmp_path, raw, "hf_overrides", name, **{name: "M"})


def test_every_name_of_transformers_is_known(tmp_path):
    """A newer release may rename more settings."""
    from transformers import CONFIG_MAPPING

    for model_type, architecture in known().items():
        kind = CONFIG_MAPPING[model_type]
        names = set(architecture.aliases) | set(architecture.aliases.values())
        names |= {name for group in architecture.spellings for name in group}
        for alias, name in kind.attribute_map.items():
            assert {alias, name} <= names, (model_type, alias, name)
