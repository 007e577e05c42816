"""Tiny random checkpoints whose tower reads floats, as Nemotron's multimodal models do, and what
transformers makes of pictures for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from milepost.images import ImageSettings, PreparedImage
from milepost.images.tiles import prepare_tiles
from tests import chatmodel, checkpoints
from tests.images.pictures import picture
from tests.pictured import IMAGE, Pictured

SIDE = 4
"""Pixels of a patch's side."""
SETTINGS = ImageSettings(
    patch_size=SIDE,
    temporal_patch_size=1,
    min_pixels=16 * SIDE**2,
    max_pixels=96 * SIDE**2,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    has_rows=False,
    is_tiled=True,
    keeps_overshoot=True,
)
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor",
    "patch_size": SIDE,
    "min_num_patches": 16,
    "max_num_patches": 96,
    "max_model_len": 16384,
    "norm_mean": list(SETTINGS.mean),
    "norm_std": list(SETTINGS.std),
}
VIDEO_SETTINGS = replace(SETTINGS, temporal_patch_size=2, frame_patches=24)
VIDEO_PROCESSOR = {
    "video_processor_type": "NemotronH_Omni_Reasoning_V3VideoProcessor",
    "patch_size": SIDE,
    "video_target_num_patches": 24,
    "norm_mean": list(SETTINGS.mean),
    "norm_std": list(SETTINGS.std),
}
_VISION: dict[str, Any] = {
    "model_type": "radio",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "mlp_ratio": 1.5,
    "max_img_size": 24,
    "patch_size": SIDE,
    "num_registers": 2,
    "video_temporal_patch_size": 2,
}
NAMES = "NemotronH_Omni_Reasoning_V3_Config", "NemotronH_Omni_Reasoning_V3"


def build(
    dtype: torch.dtype = torch.float32, image: int = IMAGE, num_drafts: int = 0, **sizes: Any
) -> PreTrainedModel:
    """Returns a model with random weights; `sizes` are of its text. With `num_drafts` it has the
    norm of models with drafts. Skips the test where transformers has no such model."""
    if not all(hasattr(transformers, name) for name in NAMES):
        pytest.skip(f"transformers {transformers.__version__} has no {NAMES[1]}")
    torch.manual_seed(0)
    text = checkpoints._nemotron_h(**({"vocab_size": 101} | sizes))
    text.config.num_nextn_predict_layers = num_drafts
    config = getattr(transformers, NAMES[0])(
        text_config=text.config,
        vision_config=_VISION,
        vision_hidden_size=48,
        projector_hidden_size=36,
        image_token_id=image,
    )
    model = getattr(transformers, NAMES[1])(config)
    model.language_model = text
    checkpoints.randomise(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda1" in name:
                parameter.fill_(1)
            if "position_embedding" in name or "cls_register" in name:
                parameter.normal_()
    return checkpoints.remembering(model).eval().to(dtype)


def save(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Builds the model and saves it in `folder`, with settings for its pictures."""
    model = build(dtype, **options)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PROCESSOR))
    return model


def prepared(height: int, width: int, seed: int = 0) -> PreparedImage:
    """Returns a picture of that many pixels as the tower reads it."""
    (tile,) = prepare_tiles(picture(height, width, seed), SETTINGS)
    return tile.image


def inputs(images: list[PreparedImage], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the values of the patches in the order of transformers' processor, row by row."""
    rows = [values_of(each) for each in images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate(rows)).to(dtype),
        "image_grid_hw": torch.tensor([each.grid[1:] for each in images]),
    }


def values_of(image: PreparedImage) -> np.ndarray:
    """Returns the values of a picture's patches, row by row of the picture."""
    down, across = (count // 2 for count in image.grid[1:])
    rows = image.rows.view(np.float32).reshape(down, across, 2, 2, -1)
    return rows.transpose(0, 2, 1, 3, 4).reshape(4 * down * across, -1)


@torch.no_grad()
def expected_logits(reference: Any, given: Pictured) -> Tensor:
    """The logits of all of a prompt's tokens, as transformers computes them."""
    own = {"input_ids": given.token_ids[None]}
    own |= inputs(given.images, reference.dtype) if given.images else {}
    return reference(**own, use_cache=False).logits[0]


TEXTS = ["<image>", "<img>", "</img>"]


def save_chat(folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """Writes a checkpoint with a tokenizer whose chats hold images; returns the folder."""
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in TEXTS])
    image = tokenizer.convert_tokens_to_ids(TEXTS[0])
    save(folder, dtype, image=image, vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(folder)
    return folder


def frames(count: int, size: tuple[int, int] = (31, 47)) -> list[Image.Image]:
    """Returns the frames of a video."""
    return [picture(*size, seed) for seed in range(count)]


def pixel_values_videos(shown: list[Image.Image], size: tuple[int, int]) -> Tensor:
    """Returns the values of frames as transformers' processor makes them, by torch's resizing."""
    pixels = torch.stack([torch.from_numpy(np.array(each)) for each in shown])
    values = pixels.permute(0, 3, 1, 2).float()
    values = functional.interpolate(
        values, size=size, mode="bicubic", align_corners=False, antialias=True
    )
    mean, std = (torch.tensor(each)[:, None, None] for each in (SETTINGS.mean, SETTINGS.std))
    return (values / 255 - mean) / std
