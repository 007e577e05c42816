"""Finds the images and videos of a conversation, in the forms in which clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from milepost.errors import InvalidPromptError

KINDS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that are images: OpenAI's two, Hugging Face's, and vLLM's own."""
VIDEOS = ("video_url", "video")
"""Types of parts that are videos: vLLM's, and Hugging Face's."""
DETAILS = (None, "auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class Given:
    """An image or a video in the form in which the client sent it."""

    source: Any
    """A URL, the bytes of a file, or a Pillow image. For a video also its frames: a mapping with a
    list of such `frames`, and their `times` in seconds or `fps`."""
    is_low: bool = False
    """Whether the image should take few tokens (`detail: low`)."""
    is_video: bool = False


def images_of(messages: Sequence[Any]) -> tuple[Sequence[Any], list[Given]]:
    """Returns messages in which each image or video is replaced by a placeholder, and the images
    and videos in order. Raises InvalidPromptError for a part that should have one and does not."""
    found: list[Given] = []
    if not any(_is_image(part) for message in messages for part in _parts(message)):
        return messages, found
    changed: list[Any] = []
    for message in messages:
        parts = [_placeholder(part, found) for part in _parts(message)]
        changed.append({**message, "content": parts} if parts else message)
    return changed, found


def images_in(prompt: Any) -> tuple[Any, list[Given], Any]:
    """Returns a plain prompt without its `multi_modal_data` and `mm_processor_kwargs`, the images
    and videos in the former, and the latter. Raises InvalidPromptError for anything else.
    """
    if not isinstance(prompt, Mapping):
        return prompt, [], None
    rest = dict(prompt)
    data, kwargs = (rest.pop(key, None) for key in ("multi_modal_data", "mm_processor_kwargs"))
    if data is None:
        return rest, [], kwargs
    if not isinstance(data, Mapping) or any(key not in ("image", "video") for key in data):
        raise InvalidPromptError(
            f"multi_modal_data with {sorted(data) if isinstance(data, Mapping) else data!r}: use "
            '{"image": IMAGE, "video": VIDEO}, or lists of them'
        )
    images = [Given(image) for image in _listed(data.get("image"))]
    images += [Given(video, is_video=True) for video in _listed(data.get("video"))]
    return rest, images, kwargs


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [] if given is None else [given]


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(part, Mapping) and part.get("type") in (*KINDS, *VIDEOS)


def _placeholder(part: Any, found: list[Given]) -> Any:
    if not _is_image(part):
        return part
    kind = part["type"]
    source: Any = part.get(kind if kind != "input_image" else "image_url")
    detail = part.get("detail")
    if isinstance(source, Mapping) and kind != "video":
        source, detail = source.get("url"), source.get("detail", detail)
    if source is None and kind in ("image", "video"):
        source = part.get("url")
    if source is None:
        what = "video" if kind in VIDEOS else "image"
        raise InvalidPromptError(f"a part of type {kind!r} has no {what}: give it a URL")
    if detail not in DETAILS:
        raise InvalidPromptError(f"detail={shown(detail)!r}: use auto, low, high or original")
    found.append(Given(source, is_low=detail == "low", is_video=kind in VIDEOS))
    marked = {"cache_control": part["cache_control"]} if part.get("cache_control") else {}
    return {"type": "image", **marked}


def shown(value: Any) -> str:
    """Returns a value for an error. Of what has items only the type is named: a body may hold
    millions, and nothing else runs while they are written out."""
    has_items = isinstance(value, list | tuple | Mapping) and len(value) > 0
    return f"a {type(value).__name__}" if has_items else str(value)[:80]
