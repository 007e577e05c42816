"""Finds the images of a conversation, in the forms in which clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidPromptError

KINDS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that are images: OpenAI's two, Hugging Face's, and vLLM's own."""
DETAILS = (None, "auto", "low", "high")


@dataclass(frozen=True, slots=True)
class Given:
    """An image as it came."""

    source: Any
    """A URL, the bytes of a file, or an image of Pillow's."""
    is_low: bool = False
    """Whether the image should take few tokens (`detail: low`)."""


def images_of(messages: Sequence[Any]) -> tuple[Sequence[Any], list[Given]]:
    """Returns messages whose image parts only say that there is one, and the images in order.
    Raises InvalidPromptError for an image part without an image.
    """
    found: list[Given] = []
    if not any(_is_image(part) for message in messages for part in _parts(message)):
        return messages, found
    changed: list[Any] = []
    for message in messages:
        parts = [_placeholder(part, found) for part in _parts(message)]
        changed.append({**message, "content": parts} if parts else message)
    return changed, found


def images_in(prompt: Any) -> tuple[Any, list[Given]]:
    """Returns a plain prompt without its `multi_modal_data`, and the images in that. Raises
    InvalidPromptError for anything but images.
    """
    if not isinstance(prompt, Mapping) or prompt.get("multi_modal_data") is None:
        return prompt, []
    data = prompt["multi_modal_data"]
    rest = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    if not isinstance(data, Mapping) or any(key != "image" for key in data):
        raise InvalidPromptError(
            f"multi_modal_data with {sorted(data) if isinstance(data, Mapping) else data!r}: use "
            '{"image": IMAGE}, or a list of images'
        )
    images = data.get("image")
    images = images if isinstance(images, list | tuple) else [] if images is None else [images]
    return rest, [Given(image) for image in images]


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _placeholder(part: Any, found: list[Given]) -> Any:
    if not _is_image(part):
        return part
    kind = part["type"]
    source, detail = part.get(kind if kind != "input_image" else "image_url"), part.get("detail")
    if isinstance(source, Mapping):
        source, detail = source.get("url"), source.get("detail", detail)
    if source is None and kind == "image":
        source = part.get("url")
    if source is None:
        raise InvalidPromptError(f"a part of type {kind!r} has no image: give it a URL")
    if detail not in DETAILS:
        raise InvalidPromptError(f"detail={str(detail)[:32]!r}: use auto, low or high")
    found.append(Given(source, is_low=detail == "low"))
    marked = {"cache_control": part["cache_control"]} if part.get("cache_control") else {}
    return {"type": "image", **marked}
