"""Facts of a model that takes images, for whoever makes its prompts."""

from __future__ import annotations

import msgspec

from milepost.images.settings import ImageSettings

LOW_DETAIL_TOKENS = 256
"""Most tokens of an image that is sent with `detail: low`."""


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How images enter the prompts of one model."""

    settings: ImageSettings
    token_id: int
    """Stands for an image in a prompt, once before images are put in, and then once per token."""
    text: str
    """The text that a chat template writes for an image; empty without a tokenizer."""

    @property
    def low_pixels(self) -> int:
        """Largest area of an image with `detail: low`."""
        return LOW_DETAIL_TOKENS * self.settings.unit**2
