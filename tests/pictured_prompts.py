"""A tiny checkpoint that takes images, in a folder an engine opens, and prompts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from milepost import LLM, SamplingParams
from tests import pictured
from tests.images.pictures import picture
from tests.mtp import add_head

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = np.random.default_rng(0).integers(0, pictured.IMAGE, 4096).tolist()
DIVIDES = {
    "vocab_size": 102,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Sizes of a text part that two ranks can share."""


def save_folder(
    folder: Path, dtype: torch.dtype = torch.float32, *, has_head: bool = False, **text: Any
) -> Path:
    """Writes a checkpoint with its settings for images, and a head for drafts if `has_head`.
    `text` changes sizes of its text part."""
    pictured.save("qwen3_5", folder, dtype, **text)
    if has_head:
        add_head(folder)
    return folder


def open_llm(folder: Path, **options: Any) -> LLM:
    given = {"num_pages": 200, "num_slots": 24, "max_num_batched_tokens": 128, "dtype": "float64"}
    return LLM(folder, skip_tokenizer_init=True, **{**given, **options})


def image(rows: int, columns: int, seed: int = 0) -> Image.Image:
    """Returns an image of that many tokens."""
    unit = pictured.SETTINGS.unit
    return picture(rows * unit, columns * unit, seed)


def asked(*parts: int | list[int] | Image.Image, **own: Any) -> dict[str, Any]:
    """A prompt of texts, each of that many tokens, and images."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens += TEXT[:part]
        elif isinstance(part, list):
            tokens += part
        else:
            tokens += [pictured.START, pictured.IMAGE, pictured.END]
            images.append(part)
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}, **own}


def answer(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> tuple[list[int], Any]:
    """Returns the tokens that an engine answers, and what its cache reports."""
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].token_ids, output.cache_report
