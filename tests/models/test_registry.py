"""What is refused: architectures and settings that nothing here runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from milepost.config import EngineConfig
from milepost.engine.assembly.auto import folder_of
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.layers.context import AttentionSpec, RecurrentSpec
from milepost.models import LoadOptions, architectures, find_folder, load_model
from tests.checkpoints import build


def change(folder: Path, name: str = "qwen3_5", **values: Any) -> Path:
    """Save a configuration with these values."""
    config = build(name).config.to_dict()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def load(folder: Path) -> None:
    load_model(folder, LoadOptions(load_format="dummy"))


@pytest.mark.parametrize("model_type", ["llama", "nonsense", None])
def test_unknown_architecture_is_refused(model_type: str | None, tmp_path: Path) -> None:
    change(tmp_path, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match=r"qwen3_5_moe, .*qwen3_next") as failure:
        load(tmp_path)
    assert repr(model_type) in str(failure.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("hidden_act", "gelu"),
        ("sliding_window", 128),
        ("use_sliding_window", True),
        ("attn_output_gate", False),
        ("layer_types", ["full_attention"] * 3 + ["mamba"]),
        ("layer_types", ["sliding_attention"] * 4),
        ("layer_types", ["full_attention"] * 3),
        ("hidden_size", "wide"),
        ("num_key_value_heads", 4),
        ("linear_num_value_heads", 4),
        ("linear_conv_kernel_dim", 1),
        ("output_gate_type", "sigmoid"),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_chunk_size", 512),
        ("compression_config", {"format": "pack-quantized"}),
        ("is_encoder_decoder", True),
    ],
)
def test_unsupported_setting_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        load(change(tmp_path, **{name: value}))


QWEN_3_6 = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
}
"""Settings that the text parts of Qwen3.6's and 3.8's configurations have besides sizes."""


@pytest.mark.parametrize("name", ["qwen3_5_multimodal", "qwen3_5_moe_multimodal"])
def test_newer_qwen_hybrids_are_read(name: str, tmp_path: Path) -> None:
    """They are of Qwen3.5's type, and stretch their positions to a million by YaRN."""
    rope = {
        "factor": 4.0,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "original_max_position_embeddings": 262_144,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "yarn",
    }
    text = build(name).config.to_dict()["text_config"] | QWEN_3_6 | {"rope_parameters": rope}
    model, _ = load_model(
        change(tmp_path, name, text_config=text), LoadOptions(load_format="dummy")
    )
    assert model.num_positions == 2**20


def test_glm5_next_is_refused_by_name(tmp_path: Path) -> None:
    """GLM-5.3-Flash, which has hyper-connections of another kind."""
    with pytest.raises(UnsupportedModelError, match="glm5_next"):
        load(change(tmp_path, model_type="glm5_next"))


def test_more_experts_per_token_than_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok=9"):
        load(change(tmp_path, "qwen3_5_moe", num_experts_per_tok=9))


def test_another_quantization_of_a_multimodal_checkpoint_is_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "bitsandbytes"}
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        load(change(tmp_path, "qwen3_5_multimodal", quantization_config=settings))


def test_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_broken_configuration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json|model_type"):
        load(tmp_path)


def test_neither_folder_nor_hub_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="no/such/folder"):
        find_folder("no/such/folder", revision=None, with_weights=True)


def test_checkpoints_of_the_hub_are_kept_where_download_dir_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repo_id: str, *, cache_dir: str | None, token: str | None, **_: object) -> str:
        assert cache_dir is not None
        assert token == "secret"
        folder = Path(cache_dir) / repo_id
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    kept = str(tmp_path / "kept")
    found = folder_of(EngineConfig(model="some/model", download_dir=kept, hf_token="secret"))
    assert found == tmp_path / "kept" / "some" / "model"


def test_layer_specs_follow_the_layer_types(tmp_path: Path) -> None:
    model, config = load_model(
        change(tmp_path, "qwen3_5_multimodal"), LoadOptions(load_format="dummy")
    )
    recurrent = RecurrentSpec(
        conv_shape=(2 * 24 + 72, 3),
        recurrent_shape=(6, 8, 12),
        grid=64,
        record_size=2 * 24 + 72 + 2 * 6,
        takes_drafts_fused=False,
    )
    attention = AttentionSpec(num_kv_heads=3, head_dim=16)
    assert model.layer_specs == (recurrent, recurrent, recurrent, attention)
    assert (model.vocab_size, model.num_positions) == (101, 1024)
    assert config.model_type == "qwen3_5"


def test_files_are_as_long_as_the_documentation_says() -> None:
    folder = Path(architectures.__path__[0])
    text = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    said = re.findall(r"`(\w+\.py)`\s\((\d+)", text)
    assert len(said) == 7
    for name, count in said:
        assert len((folder / name).read_text(encoding="utf-8").splitlines()) == int(count), name
