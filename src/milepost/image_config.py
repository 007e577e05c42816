"""Settings of images in prompts: fields of the engine's configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from milepost.checks import flat_texts, is_whole, json_text, require
from milepost.errors import ConfigError

DEFAULT_MAX_IMAGES = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The part of an engine's configuration that is about images. Raises ConfigError."""

    language_model_only: bool = False
    """Leave the vision tower of the checkpoint out, and refuse images."""
    limit_mm_per_prompt: str | None = None
    """Largest number of images and of videos in a prompt: a JSON object such as {"image": 4,
    "video": 1}. No image at all leaves the tower out. By default 999 of each."""
    mm_processor_kwargs: str | None = None
    """Limits on an image's size after resizing, in pixels: a JSON object such as {"min_pixels":
    65536, "max_pixels": 1048576}. By default the checkpoint's own. A larger image is made smaller;
    1024 pixels are a token in the Qwen3.5 family."""
    encoder_cache_size: int | None = None
    """Image tokens whose encoder outputs stay on the device, for requests that need them again
    before the prefix cache has their tokens. By default a 64th of the memory beside the weights,
    with room for two of the largest images, or for one if two would take more than a 16th."""
    encode_images_together: bool = False
    """Encode the small images of a step, of up to 1024 tokens, in one run of the vision tower. An
    image has the same bits beside any others; one alone may take longer than without this."""
    allowed_media_domains: Sequence[str] | None = None
    """Hosts from which images given as http(s) URLs may be fetched. May be given several times; by
    default none, and images come as data: URLs."""
    allowed_local_media_path: str | None = None
    """Directory below which images given as file: URLs may be read. By default none may."""

    def check_images(self) -> None:
        """Replaces settings by their canonical forms, and checks each."""
        for name in ("limit_mm_per_prompt", "mm_processor_kwargs"):
            object.__setattr__(self, name, json_text(name, getattr(self, name)))
        given = self.allowed_media_domains
        require(
            isinstance(given, list | tuple | None), f"allowed_media_domains={given!r}: use a list"
        )
        domains = flat_texts(given)
        object.__setattr__(self, "allowed_media_domains", domains or None)
        require(
            self.encoder_cache_size is None or self.encoder_cache_size >= 1,
            f"encoder_cache_size={self.encoder_cache_size}: use 1 or more",
        )
        require(
            self.allowed_local_media_path != "",
            "allowed_local_media_path='': name a directory, or leave it out",
        )
        # Both are checked as they are read.
        assert min(self.max_images, self.max_videos) >= 0
        assert len(self.pixel_limits) == 2

    @property
    def max_images(self) -> int:
        """Largest number of images in a prompt; 0 without a tower."""
        return 0 if self.language_model_only else self._most("image")

    @property
    def max_videos(self) -> int:
        """Largest number of videos in a prompt; 0 without a tower."""
        return self._most("video") if self.max_images else 0

    def _most(self, kind: str) -> int:
        given = json.loads(self.limit_mm_per_prompt or "{}")
        most = given.get(kind, DEFAULT_MAX_IMAGES)
        if isinstance(most, dict):  # vLLM also takes the sizes to expect, which nothing needs here
            most = most.get("count", DEFAULT_MAX_IMAGES)
        if not is_whole(most) or most < 0:
            raise ConfigError(
                f'limit_mm_per_prompt={given}: use {{"image": NUMBER, "video": NUMBER}}, 0 or more'
            )
        return most

    @property
    def pixel_limits(self) -> tuple[int | None, int | None]:
        """Smallest and largest area of a resized image; None for the checkpoint's own."""
        given = json.loads(self.mm_processor_kwargs or "{}")
        for name, value in given.items():
            if name not in _PIXELS:
                raise ConfigError(
                    f"mm_processor_kwargs: unknown field {name!r}: use {', '.join(_PIXELS)}"
                )
            if not is_whole(value) or value < 1:
                raise ConfigError(f"mm_processor_kwargs: {name}={value!r}: use 1 or more")
        least, most = given.get("min_pixels"), given.get("max_pixels")
        if least is not None and most is not None and least > most:
            raise ConfigError(
                f"mm_processor_kwargs: min_pixels={least} is more than max_pixels={most}"
            )
        return least, most


_PIXELS = ("min_pixels", "max_pixels")
