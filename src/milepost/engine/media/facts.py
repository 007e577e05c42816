"""Facts of a model that takes images, for whoever makes its prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from milepost.images.settings import FrameSampling, ImageSettings

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
