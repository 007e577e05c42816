"""Tiny random checkpoints that read images in tiles, as LFM2-VL does, and what transformers makes
of such images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, PreTrainedModel

from milepost.images import ImageSettings, PreparedImage, normalisation, prepare
from milepost.images.settings import ImageTiling
from tests import chatmodel, checkpoints
from tests.images.pictures import picture
from tests.pictured import IMAGE, Pictured

SIDE = 4
"""Pixels of a patch's side."""
SETTINGS = ImageSettings(
    patch_size=SIDE,
    temporal_patch_size=1,
    min_pixels=4 * 64,
    max_pixels=16 * 64,
    has_rows=False,
    is_tiled=True,
    tiling=ImageTiling(side=32),
)
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "encoder_patch_size": SIDE,
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "tile_size": 32,
    "resample": 2,
}
_VISION: dict[str, Any] = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_patches": 36,
    "patch_size": SIDE,
    "vision_use_head": False,
}


def build(
    dtype: torch.dtype = torch.float32,
    image: int = IMAGE,
    projector_use_layernorm: bool = True,
    **sizes: Any,
) -> PreTrainedModel:
    """Returns a model with random weights; `sizes` are of its text."""
    torch.manual_seed(0)
    text = checkpoints._lfm2(**({"vocab_size": 101} | sizes)).config
    config = Lfm2VlConfig(
        text_config=text,
        vision_config=_VISION,
        image_token_id=image,
        projector_hidden_size=36,
        projector_use_layernorm=projector_use_layernorm,
        tie_word_embeddings=False,
    )
    model = Lfm2VlForConditionalGeneration(config)
    checkpoints.randomise(model)
    return checkpoints.remembering(model).eval().to(dtype)


def save(folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """Builds the model and saves it in `folder`, with settings for its pictures."""
    model = build(dtype, **sizes)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def tile(height: int, width: int, seed: int = 0) -> PreparedImage:
    """Returns a picture of `height` x `width` tokens, as the tower reads a tile of its size."""
    unit = SETTINGS.unit
    return prepare(picture(height * unit, width * unit, seed), SETTINGS)


def inputs(images: list[PreparedImage]) -> dict[str, Tensor]:
    """Returns the values of the rows, in the order and with the padding of transformers'
    processor."""
    longest = max(len(each.rows) for each in images)
    values = np.zeros((len(images), longest, 3 * SIDE**2), np.float32)
    mask = np.zeros((len(images), longest), np.int32)
    for number, each in enumerate(images):
        own = values_of(each)
        values[number, : len(own)] = own
        mask[number, : len(own)] = 1
    return {
        "pixel_values": torch.from_numpy(values),
        "pixel_attention_mask": torch.from_numpy(mask),
        "spatial_shapes": torch.tensor([each.grid[1:] for each in images]),
    }


def values_of(image: PreparedImage) -> np.ndarray:
    """Returns the values of a picture's patches, row by row of the picture, channels last."""
    down, across = (count // 2 for count in image.grid[1:])
    table = normalisation(SETTINGS)
    rows = image.rows.reshape(down, across, 2, 2, 3, -1).transpose(0, 2, 1, 3, 4, 5)
    rows = rows.reshape(4 * down * across, 3, -1)
    return table[np.arange(3)[:, None], rows].transpose(0, 2, 1).reshape(len(rows), -1)


@torch.no_grad()
def expected_logits(reference: Any, given: Pictured) -> Tensor:
    """The logits of all of a prompt's tokens, as transformers computes them."""
    own = {"input_ids": given.token_ids[None]}
    own |= inputs(given.images) if given.images else {}
    return reference(**own, use_cache=False).logits[0]


TEXTS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
LABELS = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]


def save_chat(folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """Writes a checkpoint with a tokenizer whose chats hold images; returns the folder."""
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (*TEXTS, *LABELS)]
    )
    image = tokenizer.convert_tokens_to_ids(TEXTS[0])
    save(folder, dtype, image=image, vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(folder)
    return folder
