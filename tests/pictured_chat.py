"""A checkpoint that holds conversations with images: the model of `pictured` with the tokenizer of
`chatmodel`, and a template like Qwen3.5's, which writes images by itself.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from copy import deepcopy
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests import chatmodel, checkpoints, pictured
from tests.images.pictures import picture

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
VIDEO_MARK = "<|video_pad|>"
VOCAB_SIZE = chatmodel.VOCAB_SIZE + 8


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (*MARKS, VIDEO_MARK)]
    )
    return tokenizer


def save(folder: Path) -> Path:
    """Writes the checkpoint; returns the folder."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    start, image, end = tokenizer.convert_tokens_to_ids(MARKS)
    text = {**deepcopy(pictured._TEXT), "vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192}
    config = Qwen3_5Config(
        text_config=text,
        vision_config=pictured._VISION,
        image_token_id=image,
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO_MARK),
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model = Qwen3_5ForConditionalGeneration(config)
    checkpoints.randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    own = pictured.SETTINGS
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": own.patch_size,
        "size": {"shortest_edge": own.min_pixels, "longest_edge": 16 * own.max_pixels},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    videos = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "patch_size": own.patch_size,
        "size": {"shortest_edge": 2 * own.min_pixels, "longest_edge": 16 * own.max_pixels},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 12,
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def image(rows: int, columns: int, seed: int = 0) -> Image.Image:
    """An image of that many tokens."""
    unit = pictured.SETTINGS.unit
    return picture(rows * unit, columns * unit, seed)


def encoded(shown: Image.Image, kind: str = "PNG") -> str:
    """An image as base64."""
    file = BytesIO()
    shown.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return base64.b64encode(file.getvalue()).decode()


def animation(frames: Sequence[Image.Image], ms: int, kind: str = "PNG") -> bytes:
    """An animation as a file."""
    file, own = BytesIO(), {"lossless": True} if kind == "WEBP" else {}
    first, *rest = frames
    first.save(file, kind, save_all=True, append_images=rest, duration=ms, **own)
    return file.getvalue()


def data_url(shown: Image.Image, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{encoded(shown, kind)}"
