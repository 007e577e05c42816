"""Facts of a model that takes images, for whoever makes its prompts."""

from __future__ import annotations

import msgspec

from milepost.images.settings import ImageSettings

LOW_DETAIL_TOKENS = 256
"""Largest number of tokens of an image with `detail: low`."""


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How images enter the prompts of one model."""

    settings: ImageSettings
    token_id: int
    """The token that stands for an image: one before images are inserted, and then one per token of
    the image."""
    text: str
    """The text that a chat template writes for an image; empty without a tokenizer."""

    @property
    def low_pixels(self) -> int:
        """Largest area of an image with `detail: low`."""
        return LOW_DETAIL_TOKENS * self.settings.unit**2
