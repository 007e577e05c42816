"""Tiny random checkpoints that take pictures, and pictures for them."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from milepost.errors import UnsupportedModelError
from milepost.images import ImageSettings, PreparedImage, normalisation, prepare
from milepost.models import LoadOptions, load_model
from milepost.pictures import Picture
from tests import checkpoints
from tests.images.pictures import picture

IMAGE, VIDEO, START, END = 97, 98, 99, 100
"""Token ids."""
SETTINGS = ImageSettings(patch_size=4, min_pixels=64, max_pixels=4096)
_TEXT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "partial_rotary_factor": 0.5,  # transformers before 5.23 saves its default beside the other
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.5,
        "rope_theta": 100.0,
        "rope_type": "default",
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_heads": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def build(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """Returns `qwen3_5` or `qwen3_5_moe` with a tower and random weights; `sizes` are of its
    text."""
    torch.manual_seed(0)
    text = deepcopy(_TEXT) | sizes
    if name == "qwen3_5":
        config = Qwen3_5Config(text_config=text, vision_config=_VISION, **_IDS)
        model: PreTrainedModel = Qwen3_5ForConditionalGeneration(config)
    else:
        moe = Qwen3_5MoeConfig(text_config=text | _EXPERTS, vision_config=_VISION, **_IDS)
        model = Qwen3_5MoeForConditionalGeneration(moe)
    checkpoints.randomise(model)
    return checkpoints.remembering(model).eval().to(dtype)


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any
) -> PreTrainedModel:
    """Builds the model and saves it in `folder`, with settings for its pictures."""
    model = build(name, dtype, **sizes)
    model.save_pretrained(folder)
    save_settings(folder)
    return model


def save_settings(folder: Path) -> dict[str, Any]:
    """Writes and returns the settings for pictures."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": SETTINGS.patch_size,
        "size": {"shortest_edge": SETTINGS.min_pixels, "longest_edge": SETTINGS.max_pixels},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return settings


def refuse_tower(folder: Path, changes: dict[str, Any], words: str) -> None:
    """Checks that a checkpoint with these settings is refused by name, and its text part is not."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changes = dict(changes)
    config["vision_config"] |= changes.pop("vision_config", {})
    path.write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModelError, match=rf"{words}.*language_model_only"):
        load_model(folder, LoadOptions(has_tower=True))
    load_model(folder)


def image(height: int, width: int, seed: int = 0) -> PreparedImage:
    """Returns a picture of `height` x `width` tokens."""
    unit = SETTINGS.unit
    return prepare(picture(height * unit, width * unit, seed), SETTINGS)


def pixel_values(images: list[PreparedImage]) -> Tensor:
    """Returns the rows as transformers' processor makes them."""
    table, rows = normalisation(SETTINGS), []
    for each in images:
        frames = each.rows.reshape(len(each.rows), 3, -1, SETTINGS.patch_size**2)
        frames = np.broadcast_to(frames, (len(frames), 3, 2, SETTINGS.patch_size**2))
        rows.append(table[np.arange(3)[:, None, None], frames].reshape(len(frames), -1))
    return torch.from_numpy(np.concatenate(rows))


def grids(images: list[PreparedImage]) -> Tensor:
    return torch.tensor([each.grid for each in images])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictured:
    """A prompt with pictures."""

    token_ids: Tensor
    images: list[PreparedImage]
    offsets: list[int]
    """Where each picture's tokens begin."""

    @property
    def pictures(self) -> list[Picture]:
        """The pictures as requests name them."""
        return [
            Picture(
                identity=each.identity,
                offset=offset,
                num_tokens=each.num_tokens,
                grid=each.grid,
                num_positions=each.num_positions,
            )
            for each, offset in zip(self.images, self.offsets, strict=True)
        ]


def prompt(*parts: int | PreparedImage, seed: int = 0) -> Pictured:
    """Returns a prompt of texts, each of that many tokens, and pictures."""
    random = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    images, offsets = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(0, IMAGE, (part,), generator=random).tolist()
            continue
        offsets.append(len(tokens) + 1)
        images.append(part)
        tokens += [START, *[IMAGE] * part.num_tokens, END]
    return Pictured(token_ids=torch.tensor(tokens), images=images, offsets=offsets)


@torch.no_grad()
def expected_logits(reference: Any, given: Pictured) -> Tensor:
    """The logits of all of a prompt's tokens, as transformers computes them."""
    own: dict[str, Tensor] = {"input_ids": given.token_ids[None]}
    if given.images:
        own |= {
            "pixel_values": pixel_values(given.images),
            "image_grid_thw": grids(given.images),
            "mm_token_type_ids": (given.token_ids == IMAGE).int()[None],
        }
    return reference(**own, use_cache=False).logits[0]
