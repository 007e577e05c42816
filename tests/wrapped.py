"""Tiny checkpoints whose text part is Qwen3.5's, beside parts that are not run, named as they are
published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers  # its models are loaded when they are named, which takes seconds
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INTERN = "intern_s2_preview"
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_OUTER: dict[str, Any] = {
    "vision_config": _VISION,
    "insert_layer_id": 1,
    "tie_word_embeddings": True,
}


def needs(name: str) -> None:
    """Skips the test if transformers is too old to have this class."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def minicpm(version: str, **text: Any) -> PreTrainedModel:
    """Returns a MiniCPM-V of this version, such as `4_6`, with this text part."""
    name = f"MiniCPMV{version}"
    needs(f"{name}Config")
    config = getattr(transformers, f"{name}Config")(text_config=text, **_OUTER)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def write_intern(folder: Path) -> None:
    """Turns a saved multimodal checkpoint of Qwen3.5 with experts into one of Intern-S2-Preview,
    which transformers has no class for: its names, and tensors for time series."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = config["vision_config"]["model_type"] = INTERN
    config["architectures"] = ["InternS2PreviewForConditionalGeneration"]
    config["auto_map"] = {"AutoConfig": "configuration_interns2_preview.InternS2PreviewConfig"}
    config["ts_config"] = {"model_type": "interns2_preview_time_series", "out_hidden_size": 48}
    path.write_text(json.dumps(config))
    file = folder / "model.safetensors"
    others = ("model.time_series.encoder", "time_series.projector", "time_series_forecaster.head")
    save_file(load_file(file) | {f"{name}.weight": torch.ones(2, 2) for name in others}, file)
