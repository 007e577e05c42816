"""How images enter the prompts of a model, and how one request changes that.

A request's `mm_processor_kwargs` have sizes of its images and videos, and frames of its videos, by
the names that transformers' processors have. They never pass the server's own limits. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from milepost.checks import is_number
from milepost.engine.media.given import shown
from milepost.errors import InvalidRequestError
from milepost.images.settings import MAX_FPS, FrameSampling, ImageSettings

LOW_DETAIL_TOKENS = 256
"""Largest number of tokens of an image with `detail: low`."""


class VideoFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How videos enter the prompts of one model: each group of frames as a text with its time, and
    one picture."""

    settings: ImageSettings
    sampling: FrameSampling
    token_id: int
    """The token that stands for a video in a prompt, and then for each token of its frames."""
    text: str
    """The text of a group of frames after its time: what a chat template writes for a video. Empty
    without a tokenizer."""
    max_videos: int
    """Largest number of videos in a prompt."""


class TileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How images with texts around them, and perhaps in tiles, enter the prompts of one model."""

    start: str
    end: str
    """Texts around an image; empty for a checkpoint that writes none, whose tiles have no labels
    either."""

    def text(self, labels: Sequence[str], mark: str) -> str:
        """Returns the text of an image: `mark` for each tile, after its label."""
        has_labels = bool(self.start)
        inner = "".join((label if has_labels else "") + mark for label in labels)
        return self.start + inner + self.end


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How images enter the prompts of one model."""

    settings: ImageSettings
    token_id: int
    """The token that stands for an image: one before images are inserted, and then one per token of
    the image."""
    text: str
    """The text that a chat template writes for an image, or for a tile of one; empty without a
    tokenizer."""
    tiles: TileFacts | None = None
    """None if a chat template writes all texts of an image."""
    video: VideoFacts | None = None
    """None if the model takes no videos."""

    @property
    def modalities(self) -> list[str]:
        """Kinds of content that a prompt may hold besides text."""
        return ["image", "video"] if self.video is not None and self.video.max_videos else ["image"]

    @property
    def low_pixels(self) -> int:
        """Largest area of an image with `detail: low`."""
        return LOW_DETAIL_TOKENS * self.settings.unit**2


FIELD = "mm_processor_kwargs"
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Names inside `size`, which are areas."""
_PIXELS, _FRAMES = ("min_pixels", "max_pixels"), ("fps", "num_frames")
_KINDS = {"images_kwargs": _PIXELS, "videos_kwargs": (*_PIXELS, *_FRAMES)}


def facts_for(facts: ImageFacts | None, asked: object) -> ImageFacts | None:
    """Returns the facts of a model for a request with these `mm_processor_kwargs`. Of a model
    without images, whose facts are None, only the names and types are checked. Raises
    InvalidRequestError."""
    if asked is None:
        return facts
    shared = _read(asked, "", (*_PIXELS, *_FRAMES), nested=_KINDS)
    for_images, for_videos = (
        {**{name: shared[name] for name in names if name in shared}, **_inside(asked, kind, names)}
        for kind, names in _KINDS.items()
    )
    if facts is None:
        return None
    settings, video = _resized(facts.settings, for_images, "images"), facts.video
    if video is not None and video.settings.frame_patches is not None:
        named = [each for each in for_videos.values() if each.name.startswith("videos_kwargs.")]
        for each in named:
            if each.name.rpartition(".")[2] not in _FRAMES:
                raise each.refusal("frames of this model's videos have one size")
        video = msgspec.structs.replace(video, sampling=_sampled(video, for_videos))
    elif video is not None:
        video = msgspec.structs.replace(
            video,
            settings=_resized(video.settings, for_videos, "videos"),
            sampling=_sampled(video, for_videos),
        )
    return msgspec.structs.replace(facts, settings=settings, video=video)


@dataclass(frozen=True, slots=True)
class _AskedNumber:
    """A number that a request gives for a setting."""

    name: str
    """Name of the setting, as the request has it."""
    value: Any

    def refusal(self, instead: str) -> InvalidRequestError:
        return InvalidRequestError(f"{FIELD}: {self.name}={shown(self.value)}: {instead}")


_Given = dict[str, _AskedNumber]
"""Numbers by the names of `_PIXELS` and `_FRAMES`."""


def _inside(asked: Any, kind: str, names: tuple[str, ...]) -> _Given:
    inner = asked.get(kind)
    return {} if inner is None else _read(inner, f"{kind}.", names)


def _read(
    given: Any, where: str, names: tuple[str, ...], nested: Mapping[str, Any] | None = None
) -> _Given:
    """Returns the numbers of a mapping; `where` is before their names in errors, and keys of
    `nested` are left alone."""
    found: _Given = {}
    for known, asked in _flat(given, where):
        if known in (nested or {}):
            continue
        if known not in names:
            use = ", ".join((*names, "size", *(nested or {})))
            raise InvalidRequestError(f"{FIELD}: unknown field {asked.name[:80]!r}: use {use}")
        if known in found:
            raise asked.refusal(f"{found[known].name} says the same: use one of them")
        if asked.value is None:
            continue
        if known == "fps":
            is_valid = is_number(asked.value) and 0 < asked.value <= MAX_FPS
            use = f"use a number above 0, up to {MAX_FPS}"
        else:
            is_valid, use = type(asked.value) is int and asked.value >= 1, "use 1 or more"
        if not is_valid:
            raise asked.refusal(use)
        found[known] = asked
    if "fps" in found and "num_frames" in found:
        raise found["fps"].refusal(f"{found['num_frames'].name} is set too: use one of them")
    return found


def _flat(given: Any, where: str) -> Iterator[tuple[str, _AskedNumber]]:
    """Yields the entries of a mapping by name, and in place of `size` those inside it."""
    for name, value in _mapping(given, where).items():
        if name == "size":
            for edge, area in _mapping({} if value is None else value, f"{where}size.").items():
                yield _EDGES.get(edge, f"size.{edge}"), _AskedNumber(f"{where}size.{edge}", area)
        else:
            yield str(name), _AskedNumber(f"{where}{name}", value)


def _mapping(given: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        name = f"{FIELD}.{where}".rstrip(".")
        raise InvalidRequestError(f"{name}={shown(given)}: use a mapping")
    return given


def _resized(settings: ImageSettings, given: _Given, kind: str) -> ImageSettings:
    """Returns settings with the limits of a request. Pictures whose limit a request sets are not
    cut into tiles."""
    least, most = given.get("min_pixels"), given.get("max_pixels")
    limit, token = settings.max_pixels, settings.unit**2
    for asked in (least, most):
        if asked is not None and asked.value > limit:
            raise asked.refusal(f"the limit for {kind} is {limit} here")
    if most is not None and most.value < token:
        raise most.refusal(f"a token has {token} pixels: use as many or more")
    if least is not None and most is not None and least.value > most.value:
        raise least.refusal(f"{most.name} is less, {most.value}")
    if most is not None:
        low = min(settings.min_pixels, most.value)
        settings = replace(settings, min_pixels=low, max_pixels=most.value, tiling=None)
    return settings if least is None else replace(settings, min_pixels=least.value)


def _sampled(video: VideoFacts, given: _Given) -> FrameSampling:
    """Returns which frames of a video file are taken."""
    sampling, fps, count = video.sampling, given.get("fps"), given.get("num_frames")
    if count is not None:
        if count.value > sampling.max_frames:
            raise count.refusal(f"the limit is {sampling.max_frames} here")
        return replace(sampling, min_frames=count.value, max_frames=count.value)
    return sampling if fps is None else replace(sampling, fps=float(fps.value))
