"""What `config.json` alone makes certain is refused before torch is imported, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milepost.config import EngineConfig
from milepost.engine.assembly.setup import _check_settings
from milepost.errors import ConfigError
from milepost.models.early import declared_types, refuse_early
from milepost.models.registry import known
from tests.models.test_names import YARN, raw_of

FP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KV4 = {**FP8, "kv_cache_scheme": {"type": "float", "num_bits": 4}}

CERTAIN = [
    ("qwen3_next", {}, {"max_model_len": 1025}, "the model's own limit is 1024"),
    ("qwen3_5_moe", {}, {"max_model_len": 1025}, "the model's own limit is 1024"),
    (
        "qwen3_next",
        {"rope_parameters": {"rope_type": "yarn", **YARN}},
        {"max_model_len": 1025},
        "1024",
    ),
    ("qwen3_next", {"hidden_size": -1}, {}, "hidden_size=-1"),
    ("qwen3_next", {"model_type": "llama"}, {}, "model_type='llama' is not supported"),
    ("qwen3_next", {"model_type": ["x"]}, {}, "model_type=['x']"),
    ("qwen3_next", {}, {"quantization": "awq"}, "config.json: quantization='awq' cannot be made"),
    ("qwen3_next", {"quantization_config": FP8}, {"quantization": "gptq"}, "with 'fp8'; leave"),
    ("qwen3_next", {"quantization_config": FP4}, {}, "of 4-bit floats NVFP4 is read"),
    ("qwen3_next", {"quantization_config": KV4}, {}, "kv_cache_scheme="),
    ("qwen3_next", {}, {"tensor_parallel_size": 4}, "num_attention_heads=6 is not a multiple"),
]
LATER = [
    ("qwen3_next", {}, {"max_model_len": 1025, "hf_overrides": {"max_position_embeddings": 2048}}),
    ("qwen3_next", {"hidden_size": -1}, {"hf_overrides": {"hidden_size": 48}}),
    ("qwen3_next", {"quantization_config": KV4}, {"kv_cache_dtype": "bfloat16"}),
    ("qwen3_next", {}, {"quantization": "fp8", "tensor_parallel_size": 3}),
    ("qwen3_next", {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"max_model_len": 4096}),
    (
        "qwen3_next",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"max_model_len": 4096},
    ),
]


def configuration(folder: Path, raw: dict[str, Any], options: dict[str, Any]) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return EngineConfig(model=str(folder), load_format="dummy", device="cpu", **options)


def changed(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes settings where the file has them."""
    raw = raw_of(name)
    outer = {key: changes[key] for key in changes if key in ("model_type", "quantization_config")}
    text = {key: value for key, value in changes.items() if key not in outer}
    if "text_config" in raw:
        return {**raw, **outer, "text_config": raw["text_config"] | text}
    return raw | outer | text


@pytest.mark.parametrize(("name", "changes", "options", "said"), CERTAIN)
def test_what_is_certain_is_refused(name, changes, options, said, tmp_path):
    config = configuration(tmp_path, changed(name, changes), options)
    with pytest.raises(ConfigError) as early:
        refuse_early(config)
    assert said in str(early.value)
    assert_same(config, early.value)


@pytest.mark.parametrize(("name", "changes", "options"), LATER)
def test_what_is_accepted_later_is_not_refused(name, changes, options, tmp_path):
    refuse_early(configuration(tmp_path, changed(name, changes), options))


@pytest.mark.parametrize("name", known())
def test_every_architecture_passes(name, tmp_path):
    if not name.endswith("_text"):
        refuse_early(configuration(tmp_path, raw_of(name), {"max_model_len": 64}))


def assert_same(config: EngineConfig, early: ConfigError) -> None:
    """The full check refuses it too, in the same words; it also names the layer that it cannot
    share out."""
    with pytest.raises(type(early)) as full:
        _check_settings(config, Path(config.model))
    if str(early).startswith("tensor_parallel_size"):
        assert "is not a multiple of it" in str(full.value)
    else:
        assert str(full.value) == str(early)


ROPES = [
    {"rope_type": "yarn", **YARN},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic"},
    {"rope_type": "longrope", "original_max_position_embeddings": 64},
    {"type": "linear", "factor": 0.5},
    {"rope_type": "su", "factor": "2"},
    {"rope_type": 7},
]
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "max_position_embeddings": st.sampled_from([256, 2048, 0, None, "8"]),
        "rope_parameters": st.sampled_from(ROPES),
        "rope_scaling": st.sampled_from(ROPES),
        "num_attention_heads": st.sampled_from([4, 12, 0]),
        "layer_types": st.sampled_from([["full_attention"] * 4, ["linear_attention"] * 4, None, 3]),
        "quantization_config": st.sampled_from(
            [FP4, FP8, KV4, {}, None, "fp8", {"quant_method": 3}]
        ),
        "torch_dtype": st.sampled_from(["float16", "int8"]),
        "hidden_size": st.sampled_from([48, 10**9]),
        "text_config": st.sampled_from([{}, None, 3]),
    },
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_model_len": st.sampled_from([64, 300, 1024, 1025, 5000]),
        "quantization": st.sampled_from(["fp8", "awq", "nonsense"]),
        "tensor_parallel_size": st.sampled_from([2, 3, 4, 5]),
        "kv_cache_dtype": st.sampled_from(["fp8", "bfloat16"]),
        "hf_overrides": st.sampled_from([{"max_position_embeddings": 5000}, {}]),
    },
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["qwen3_next", "qwen3_5_moe", "lfm2"]), changes=CHANGES, options=OPTIONS
)
def test_nothing_is_refused_that_the_full_check_accepts(name, changes, options, tmp_path):
    config = configuration(tmp_path, changed(name, changes), options)
    try:
        refuse_early(config)
    except ConfigError:
        with pytest.raises(ConfigError):
            _check_settings(config, tmp_path)


def test_the_types_are_those_of_the_registry():
    assert declared_types() == tuple(known())


def test_a_model_of_the_hub_is_judged_by_the_configuration_that_is_already_here(tmp_path):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("1")
    options = {"model": "some/model", "download_dir": str(tmp_path), "max_model_len": 1025}
    refuse_early(EngineConfig(**options))
    (snapshot / "config.json").write_text(json.dumps(raw_of("qwen3_next")))
    with pytest.raises(ConfigError, match="max_model_len=1025"):
        refuse_early(EngineConfig(**options))


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "run-batch"])
def test_a_refused_command_never_imports_torch(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_of("qwen3_next")))
    source = tmp_path / "in.jsonl"
    source.touch()
    files = ["-i", str(source), "-o", str(tmp_path / "out")] if command == "run-batch" else []
    words = [command, *files, *(["hello"] if command == "generate" else [])]
    words += ["--model", str(tmp_path), "--max-model-len", "1025"]
    script = (
        f"import sys; from milepost.cli.main import main; status = main({words!r}); "
        "print(status, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "2 []\n", done.stderr
    assert "max_model_len=1025: the model's own limit is 1024 positions" in done.stderr
