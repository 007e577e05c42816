"""Settings of quantised checkpoints, as they stand in a configuration: what changes the meaning of
weights and is not read is refused by name, how numbers were found is passed over."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3NextConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.quantised import Fp4Precision, Fp8Precision, Int4Precision, Int8Precision
from milepost.layers.weights import RawPrecision
from milepost.models.quantization import has_fp8_kv, read_quantization

_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "bitsandbytes.*use the model's FP8"),
    (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "MIXED_PRECISION.*needs quantized_layers",
    ),
    (
        {
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.b": {"quant_algo": "NVFP4"}, "a.c": {"quant_algo": "MXFP8"}},
        },
        r"quantized_layers\['a.c'\]: quant_algo='MXFP8'",
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.b": {"quant_algo": "NVFP4", "group_size": 32}},
        },
        r"quantized_layers\['a.b'\]: group_size=32",
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.b": {"quant_algo": "NVFP4", "pre_quant_scale": True}},
        },
        r"quantized_layers\['a.b'\]: pre_quant_scale=True",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}},
        },
        "type int with 8 bits are not(?!.*NVFP4).*use the model's FP8",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ.*use the model's FP8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "group_size": 16}, "group_size=16"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
        "g.weights: group_size=32",
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"g": {"pre_quant_scale": True, "has_zero_point": False}},
        },
        "g: pre_quant_scale=True",
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "FP8_PB_WO"),
    ({"quant_method": "auto-round", "bits": 8}, "bits=8"),
    (
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"mlp.down_proj": {"bits": 8}}},
        "mlp.down_proj.*8 bits",
    ),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
        "llm_compressor",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        "scale_fmt='ue8m0'",
    ),
    ({"quant_method": "mxfp4"}, "mxfp4.*use the model's FP8 or 4-bit integer"),
    ({"quant_method": "fp8"}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
    ({"quant_method": "gptq", "bits": 8}, "bits=8"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "compressed-tensors"}, "config_groups"),
    (
        {
            "quant_method": "compressed-tensors",
            "quantization_status": "frozen",
            "config_groups": {"g": {"weights": _INT4}},
            "format": "pack-quantized",
        },
        "quantization_status='frozen'",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "float", "num_bits": 4}}},
        },
        "g: format=None.*supported are nvfp4-pack-quantized",
    ),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "other": 1}, "other=1"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "pack_dtype='int8'"),
    ({"quant_method": "gptq", "bits": 4, "format": "qqq"}, "format='qqq'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size='128'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 96}, "group_size=96"),
    ({"quant_method": "awq", "bits": 4, "group_size": 192}, "group_size=192"),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 16}, "group_size=16"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:*": {}}}, r"dynamic has '\*'"),
    ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits=8"),
    ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": 8}}, "extra_config.*=8"),
]
_AS_WRITTEN: dict[str, dict[str, Any]] = {
    "gptq": {
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "method": "gptq",
        "pack_dtype": "int32",
        "dynamic": {"lm_head": {}, "-:.*mlp.gate.*": {}, "+:.*down.*": {"bits": 4}},
        "true_sequential": True,
        "static_groups": False,
        "damp_percent": 0.05,
        "dataset": None,
        "tokenizer": None,
        "model_seqlen": 2048,
        "meta": {"quantizer": ["gptqmodel:4.0"], "mse": 0.0},
        "act_group_aware": True,
        "block_name_to_quantize": "model.layers",
        "exllama_config": {"version": 1},
        "autoround_version": "0.13.0",
        "iters": 200,
        "data_type": "int",
        "rotation": None,
    },
    "awq": {
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "backend": "autoawq",
        "do_fuse": False,
        "exllama_config": None,
        "format": "gemm",
        "fuse_max_seq_len": 2048,
        "modules_to_fuse": None,
        "modules_to_not_convert": ["gate"],
    },
    "auto-round": {
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "act_bits": 16,
        "packing_format": "auto_round:auto_gptq",
        "autoround_version": "0.9.0",
        "iters": 200,
        "act_data_type": "int",
        "act_dynamic": True,
        "act_group_size": 128,
        "act_sym": True,
        "amp": True,
        "batch_size": 8,
        "enable_quanted_input": False,
        "lr": 0.005,
        "low_gpu_mem_usage": True,
        "nsamples": 512,
        "seqlen": 2048,
        "super_bits": None,
        "scale_dtype": "torch.float16",
        "to_quant_block_names": ["model.layers"],
        "extra_config": {"mlp.gate": {"bits": 16}},
        "regex_config": {".*gate": {"bits": 16}},
        "supported_types": ["Linear"],
        "backend": "auto_round:exllamav2",
        "static_kv_dtype": 0,
    },
}
"""As their makers write them, with how they were found."""
_UNREAD = [
    ("gptq", {"adapter": {"name": "lora", "rank": 32}}, "adapter="),
    ("gptq", {"rotation": "hadamard"}, "rotation='hadamard'"),
    ("gptq", {"method": "qqq"}, "method='qqq'"),
    ("gptq", {"act_bits": 8}, "act_bits=8"),
    ("gptq", {"data_type": "nv_fp"}, "data_type='nv_fp'"),
    ("gptq", {"other": 1}, "other=1"),
    ("awq", {"backend": "llm-awq"}, "backend='llm-awq'"),
    ("awq", {"format": "gemv_fast"}, "format='gemv_fast'"),
    ("awq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic.*other bits"),
    ("awq", {"other": {"bits": 8}}, "other="),
    ("auto-round", {"super_bits": 6}, "super_bits=6"),
    ("auto-round", {"static_kv_dtype": "fp8"}, "static_kv_dtype='fp8'"),
    ("auto-round", {"static_attention_dtype": "fp8"}, "static_attention_dtype='fp8'"),
    ("auto-round", {"rotation_config": {"hadamard": True}}, "rotation_config="),
    ("auto-round", {"regex_config": {".*down": {"bits": 8}}}, r"regex_config\['.\*down.*8 bits"),
    ("auto-round", {"other": True}, "other=True"),
]
FLOAT8 = {"type": "float", "num_bits": 8, "symmetric": True, "observer": None}
BY_CHANNEL = FLOAT8 | {"strategy": "channel", "dynamic": False, "actorder": None}
BY_TOKEN = FLOAT8 | {"strategy": "token", "dynamic": True}
BY_BLOCK = BY_CHANNEL | {"strategy": "block", "block_structure": [128, 128]}
FLOAT4 = FLOAT8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
INT8_BY_CHANNEL = BY_CHANNEL | {"type": "int"}
INT8_BY_TOKEN = BY_TOKEN | {"type": "int"}
COMPRESSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"weights": BY_CHANNEL | {"symmetric": False}}, "weights: symmetric=False"),
    ({}, {"weights": BY_CHANNEL | {"dynamic": True}}, "weights: dynamic=True"),
    ({}, {"weights": BY_CHANNEL | {"other": 2}}, "g.weights: other=2"),
    ({}, {"input_activations": BY_TOKEN | {"symmetric": False}}, "input_activations: symm"),
    ({}, {"input_activations": BY_TOKEN | {"strategy": "tensor"}}, "strategy='tensor'.*dyna"),
    ({}, {"input_activations": BY_TOKEN | {"dynamic": "local"}}, "dynamic='local'"),
    ({}, {"weights": BY_BLOCK}, "strategy='token'.*supported are dynamic groups of 128"),
    ({}, {"output_activations": BY_TOKEN}, "g: output_activations"),
    ({}, {"format": "marlin-24"}, "format='marlin-24'"),
    ({}, {"targets": ["Embedding"]}, "targets has 'Embedding'"),
    (
        {"format": "pack-quantized"},
        {"weights": _INT4 | {"group_size": 48}, "input_activations": None},
        "group_size=48",
    ),
    (
        {"format": "pack-quantized"},
        {"weights": _INT4 | {"actorder": "group"}, "input_activations": None},
        "actorder='group'",
    ),
    (
        {"format": "nvfp4-pack-quantized"},
        {"weights": FLOAT4 | {"group_size": 32}, "input_activations": None},
        "group_size=32 is not supported for 4-bit floats",
    ),
    (
        {"format": "nvfp4-pack-quantized"},
        {"weights": FLOAT4 | {"symmetric": False}, "input_activations": None},
        "g.weights: symmetric=False",
    ),
    (
        {"format": "nvfp4-pack-quantized"},
        {"weights": FLOAT4, "input_activations": BY_TOKEN},
        "type float with 4 bits, 8-bit activations",
    ),
    (
        {"format": "nvfp4-pack-quantized"},
        {"weights": FLOAT4 | {"actorder": "group"}, "input_activations": None},
        "actorder='group'",
    ),
    ({"config_groups": {"FP8_DYNAMIC": ["Linear"]}}, {}, r"FP8_DYNAMIC'\]=\['Linear'\] is no map"),
    ({"ignore": ["re:*gate"]}, {}, r"ignore has '\*gate'"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparse-24-bitmask"),
    ({"transform_config": {"config_groups": {"u": {}}}}, {}, "transform_config"),
    ({"other": True}, {}, "other=True"),
]


@pytest.mark.parametrize(("changes", "of_group", "named"), COMPRESSED, ids=lambda e: str(e)[:40])
def test_settings_of_compressed_tensors_are_refused_by_name(changes, of_group, named) -> None:
    """What changes how values are read is never passed over."""
    read_quantization(_compressed({}, {}), (), has_files=False)
    with pytest.raises(UnsupportedModelError, match=named):
        read_quantization(_compressed(changes, of_group), (), has_files=False)


INT8: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"input_activations": INT8_BY_TOKEN | {"symmetric": False}}, "zero points are not read"),
    ({}, {"weights": INT8_BY_CHANNEL | {"symmetric": False}}, "g.weights: symmetric=False"),
    ({}, {"weights": INT8_BY_CHANNEL | {"strategy": "group"}}, "strategy='group'.* int8 weights"),
    ({}, {"weights": INT8_BY_CHANNEL | {"strategy": "block"}}, "supported are channel, tensor"),
    ({}, {"input_activations": BY_TOKEN}, "int8 weights need int8 activations"),
    ({}, {"input_activations": INT8_BY_TOKEN | {"num_bits": 4}}, "need int8 activations"),
    ({}, {"input_activations": INT8_BY_TOKEN | {"dynamic": False}}, "strategy='token'.*static"),
    ({}, {"weights": BY_CHANNEL}, "float8 weights need float8 activations"),
    ({"format": "pack-quantized"}, {}, "format='pack-quantized' is not supported for int8"),
    ({}, {"input_activations": None}, "int with 8 bits are not.*8-bit integer activations"),
]


@pytest.mark.parametrize(("changes", "of_group", "named"), INT8, ids=lambda e: str(e)[:40])
def test_settings_of_int8_are_refused_by_name(changes, of_group, named) -> None:
    group = {"weights": INT8_BY_CHANNEL, "input_activations": INT8_BY_TOKEN}
    layout = {"format": "int-quantized"}
    forms = read_quantization(_compressed(layout, group), (), has_files=False)
    expected = Int8Precision(strategy="channel")
    assert forms.precision_of("model.layers.0.mlp.up_proj") == expected
    with pytest.raises(UnsupportedModelError, match=named):
        read_quantization(_compressed(layout | changes, group | of_group), (), has_files=False)


@pytest.mark.parametrize("method", _AS_WRITTEN)
def test_how_numbers_were_found_is_passed_over(method: str) -> None:
    settings = {"quant_method": method, **_AS_WRITTEN[method]}
    forms = read_quantization(settings, (), has_files=False)
    assert isinstance(forms.precision_of("model.layers.0.mlp.up_proj"), Int4Precision)
    assert forms.precision_of("model.layers.0.mlp.gate") == RawPrecision()


@pytest.mark.parametrize(("method", "changes", "named"), _UNREAD, ids=lambda e: str(e)[:40])
def test_settings_that_nobody_reads_are_refused_by_name(
    method: str, changes: dict[str, Any], named: str
) -> None:
    settings = {"quant_method": method, **_AS_WRITTEN[method], **changes}
    with pytest.raises(UnsupportedModelError, match=named):
        read_quantization(settings, (), has_files=False)


def _compressed(changes: dict[str, Any], of_group: dict[str, Any]) -> dict[str, Any]:
    """As they are written, with what says nothing."""
    group = {
        "weights": BY_CHANNEL,
        "input_activations": BY_TOKEN,
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "config_groups": {"g": group | of_group},
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
        "version": "0.12.2",
        **changes,
    }


def test_a_class_among_targets_is_every_projection() -> None:
    settings = _compressed({}, {"targets": ["Linear", "re:.*q_proj"]})
    forms = read_quantization(settings, (), has_files=False)
    assert forms.precision_of("model.layers.0.mlp.up_proj") != RawPrecision()


@pytest.mark.parametrize("names", [["any", "some"], ["some", "any"]])
def test_what_names_a_module_goes_before_what_names_all(names: list[str]) -> None:
    """Whichever stands first."""
    groups = {
        "any": {"weights": BY_CHANNEL, "input_activations": BY_TOKEN, "targets": ["Linear"]},
        "some": {
            "weights": FLOAT4,
            "input_activations": FLOAT4 | {"dynamic": "local"},
            "targets": ["re:.*mlp.*"],
            "format": "nvfp4-pack-quantized",
        },
    }
    settings = _compressed({"config_groups": {name: groups[name] for name in names}}, {})
    settings |= {"format": "mixed-precision"}
    groups["any"]["format"] = "float-quantized"
    forms = read_quantization(settings, (), has_files=False)
    assert isinstance(forms.precision_of("model.layers.0.mlp.up_proj"), Fp4Precision)
    assert isinstance(forms.precision_of("model.layers.0.self_attn.q_proj"), Fp8Precision)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
        ({"kv_cache_scheme": FLOAT8 | {"strategy": "channel"}}, "kv_cache_scheme"),
        ({"kv_cache_scheme": FLOAT8 | {"symmetric": False}}, "symmetric"),
        ({"kv_cache_scheme": FLOAT8 | {"dynamic": True}}, "dynamic"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme='fp8' is no mapping"),
    ],
)
def test_schemes_of_kv_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        has_fp8_kv(Qwen3NextConfig(quantization_config=settings))


def test_both_words_for_kv_in_float8_are_read() -> None:
    for settings in ({"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": FLOAT8}):
        assert has_fp8_kv(Qwen3NextConfig(quantization_config=settings))
    assert not has_fp8_kv(Qwen3NextConfig())


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_quantization(settings, (), has_files=False)
