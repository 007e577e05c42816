"""Chats with images of one engine, as the tests of each kind of image processor hold them."""

from __future__ import annotations

from typing import Any

from milepost import LLM, RequestOutput, SamplingParams
from tests.images.pictures import picture

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"num_pages": 200, "dtype": "float64", "max_num_batched_tokens": 128}


def image(size: tuple[int, int], seed: int = 0) -> dict[str, Any]:
    """The part of a message that shows an image of this height and width in pixels."""
    return {"type": "image", "image": picture(*size, seed)}


def chat(llm: LLM, *parts: str | dict[str, Any], **options: Any) -> RequestOutput:
    """Returns the output for one message of these parts, texts and images."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    messages = [{"role": "user", "content": content}]
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False, **options)
    return output


def answer_of(llm: LLM, *parts: str | dict[str, Any]) -> list[int]:
    return chat(llm, *parts).outputs[0].token_ids
