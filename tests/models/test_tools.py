"""What the usual tools write beside a model's weights: taken where it changes nothing, refused by
name where it would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import ConfigError
from milepost.models import LoadOptions, load_model
from milepost.models.registry import load_config
from tests.checkpoints import save
from tests.models.test_names import WITH_ROTARY, raw_of
from tests.models.test_weights import assert_same, edit, parameters, refused, save_sharded
from tests.quantised import EXPERTS, FORMATS, SIZES

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save("qwen3_next", tmp_path)
    return tmp_path


EXTRAS = {
    "bias": ("model.layers.0.linear_attn.out_proj.bias", torch.zeros(48)),
    "bias of an expert": ("model.layers.0.mlp.experts.3.up_proj.bias", torch.zeros(20)),
    "bias of a convolution": ("model.layers.0.linear_attn.conv1d.bias", torch.zeros(120)),
    "bias in half precision": ("model.layers.3.self_attn.q_proj.bias", torch.zeros(192).half()),
    "zero point": (
        "model.layers.0.linear_attn.out_proj.weight_zero_point",
        torch.zeros(48, 1, dtype=torch.int8),
    ),
    "frequencies": ("model.rotary_emb.inv_freq", torch.ones(8)),
    "frequencies of a layer": ("model.layers.3.self_attn.rotary_emb.inv_freq", torch.ones(8)),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_changes_nothing_is_taken(extra, folder):
    expected = parameters(folder)
    name, values = EXTRAS[extra]
    edit(folder, lambda tensors: tensors.update({name: values}))
    assert_same(parameters(folder), expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model.layers.0.linear_attn.out_proj.bias", torch.full((48,), 1e-6)),
        ("model.layers.0.linear_attn.out_proj.bias", torch.full((48,), float("nan"))),
        ("model.layers.0.linear_attn.out_proj.weight_zero_point", torch.ones(48, 1)),
        # Packed, zeros stand for the smallest number.
        ("model.layers.0.linear_attn.out_proj.weight_zero_point", torch.zeros(6, 1).int()),
        ("model.layers.0.linear_attn.out_projection.bias", torch.zeros(48)),
        ("model.layers.0.linear_attn.out_proj.pre_quant_scale", torch.ones(72)),
        ("model.layers.0.linear_attn.out_proj.lora_A.default.weight", torch.zeros(8, 72)),
        ("model.layers.0.linear_attn.out_proj.base_layer.weight", torch.zeros(48, 72)),
        ("model.rotary_emb.scale", torch.ones(8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_an_answer_is_refused(name, values, folder):
    edit(folder, lambda tensors: tensors.update({name: values}))
    refused(folder, "model.safetensors", name, "no place")


def test_a_bias_where_a_layer_has_one_is_loaded(tmp_path):
    save("qwen3_next", tmp_path, attention_bias=True)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.3.self_attn.k_proj.bias"))
    refused(tmp_path, r"k_proj\.bias", "missing")


@pytest.mark.parametrize("left", range(4))
def test_a_shared_expert_without_units_may_be_there_in_part(left, tmp_path):
    """None of its tensors decides about another."""
    save("qwen3_next_no_shared_expert", tmp_path)
    expected = parameters(tmp_path)

    def drop(tensors: dict[str, Tensor]) -> None:
        names = sorted(name for name in tensors if ".0.mlp.shared_expert" in name)
        assert len(names) == 4
        for name in names[:left] + names[left + 1 :]:
            del tensors[name]

    edit(tmp_path, drop)
    assert_same(parameters(tmp_path), expected)


@pytest.mark.parametrize("single", ["gate_up_proj", "down_proj"])
def test_experts_may_be_stacked_in_part(single, tmp_path):
    save("qwen3_5_moe", tmp_path)
    expected = parameters(tmp_path)

    def exchange(tensors: dict[str, Tensor]) -> None:
        for prefix in {key.split("experts.")[0] for key in tensors if ".experts." in key}:
            parts = [
                torch.stack([tensors.pop(f"{prefix}experts.{i}.{part}.weight") for i in range(6)])
                for part in (("down_proj",) if single == "down_proj" else ("gate_proj", "up_proj"))
            ]
            tensors[f"{prefix}experts.{single}"] = torch.cat(parts, 1)

    edit(tmp_path, exchange)
    assert_same(parameters(tmp_path), expected)


def test_files_without_an_index_are_all_of_the_model(tmp_path):
    """As quantisers name them."""
    save("qwen3_next", tmp_path / "one")
    save_sharded(tmp_path / "many")
    (tmp_path / "many" / INDEX).unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "many" / "adapter_model.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "many" / "consolidated.safetensors")
    assert_same(parameters(tmp_path / "many"), parameters(tmp_path / "one"))
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "gptq-4bit.safetensors")
    assert_same(parameters(tmp_path / "many"), parameters(tmp_path / "one"))
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "one" / "other.safetensors")
    refused(tmp_path / "one", r"lm_head\.weight", "in two files")


def test_an_adapter_alone_is_no_model(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    refused(folder, "it is an adapter: merge it")


def test_an_index_that_is_left_from_other_weights(tmp_path, caplog):
    index = save_sharded(tmp_path)
    save("qwen3_next", tmp_path / "one")
    merged = load_file(tmp_path / "one" / "model.safetensors")
    save_file(merged, tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "are both there")
    (tmp_path / next(iter(index.values()))).unlink()
    assert_same(parameters(tmp_path), parameters(tmp_path / "one"))
    assert "names files that are not there" in caplog.text


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "", "a\0b", "\ud800", "x" * 5000, 7]
)
def test_an_index_names_files_of_its_folder(name, tmp_path):
    index = save_sharded(tmp_path)
    changed = index | {"lm_head.weight": name}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": changed}))
    refused(tmp_path, "model.safetensors.index.json")


def test_a_copy_in_another_file_changes_nothing(tmp_path):
    save("qwen3_next", tmp_path / "one")
    index = save_sharded(tmp_path)
    name = "model.layers.1.linear_attn.out_proj.weight"
    values = load_file(tmp_path / index[name])[name]
    other = tmp_path / next(file for file in sorted(set(index.values())) if file != index[name])
    save_file(load_file(other) | {name: values}, other)
    assert_same(parameters(tmp_path), parameters(tmp_path / "one"))
    for change in (values + 1, values.double(), values[:1]):
        save_file(load_file(other) | {name: change.contiguous()}, other)
        refused(tmp_path, name, "in two files")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "F4"},
        {"shape": [2**40, 2**40]},
        {"shape": [-1]},
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [8, 4]},
        {"shape": "x"},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(changes, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    count = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + count])
    header["lm_head.weight"] |= changes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + count :])
    refused(folder, "model.safetensors")


def as_of_4_57(raw: dict) -> dict:
    """The same settings as transformers named them before 5."""
    rope = raw.pop("rope_parameters", None)
    dtype = raw.pop("dtype", None)
    limit = {"time_step_limit": [0.0, float("inf")]} if "time_step_limit" in raw else {}
    old = {"torch_dtype": dtype, "rope_scaling": None, **limit}
    if rope:
        old |= {"rope_theta": rope["rope_theta"]}
        if "partial_rotary_factor" in rope:
            old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return raw | old | {"transformers_version": "4.57.1"}


@pytest.mark.parametrize("name", [*WITH_ROTARY, "nemotron_h", "kimi_linear"])
def test_configurations_of_older_releases_are_read_alike(name, tmp_path):
    def read(raw: dict) -> dict:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found = load_config(tmp_path).to_dict()
        left = ("transformers_version", "rope_scaling", "rope_parameters")
        return {key: value for key, value in found.items() if key not in left[: 2 + (not value)]}

    assert read(as_of_4_57(raw_of(name))) == read(raw_of(name))


WRITTEN = {
    "llm-compressor": FORMATS["fp8-channels"][1]
    | {
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13.0",
    },
    "transformers": FORMATS["fp8-blocks"][1] | {"dequantize": False, "modules_to_not_convert": []},
    "autoawq": FORMATS["awq"][1] | {"version": "gemm", "modules_to_not_convert": None},
    "gptqmodel": FORMATS["gptq"][1]
    | {
        "desc_act": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:5.6.0"], "damp_percent": 0.05, "act_group_aware": True},
    },
    "modelopt": FORMATS["modelopt"][1] | {"producer": {"name": "modelopt", "version": "0.40.0"}},
    "auto-round": FORMATS["auto-round"][1] | {"autoround_version": "0.9.1", "iters": 200},
}


@pytest.mark.parametrize("tool", WRITTEN)
def test_what_quantisers_say_is_read(tool, tmp_path):
    raw = raw_of("qwen3_next") | SIZES | EXPERTS | {"unsloth_version": "2026.9"}
    raw["quantization_config"] = WRITTEN[tool]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model(tmp_path, LoadOptions(load_format="dummy"))
    raw["quantization_config"] = WRITTEN[tool] | {"rotation": "hadamard"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json|rotation") as failure:
        load_model(tmp_path, LoadOptions(load_format="dummy"))
    assert "rotation='hadamard'" in str(failure.value)
