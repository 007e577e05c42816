"""Pictures on their way to the model: decoded, resized and cut into patches. Needs Pillow and
numpy, and no torch. Its modules:

    settings of a checkpoint      settings, processors
    sizes of resized pictures     sizes
    from bytes to pixels          headers, decoding, containers
    from pixels to patches        patches, tiles, resampling
    frames of videos              videos
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from milepost.errors import missing
from milepost.images.processors import (
    read_frame_sampling,
    read_image_settings,
    read_video_settings,
)
from milepost.images.settings import FrameSampling, ImageSettings
from milepost.images.sizes import num_tokens_of

if TYPE_CHECKING:
    from milepost.images.patches import PreparedImage, normalisation, prepare

__all__ = [
    "FrameSampling",
    "ImageSettings",
    "PreparedImage",
    "normalisation",
    "num_tokens_of",
    "prepare",
    "read_frame_sampling",
    "read_image_settings",
    "read_video_settings",
]


def __getattr__(name: str) -> Any:
    """Imports names that need Pillow only when they are asked for. Raises ConfigError if it is not
    installed."""
    if name not in ("PreparedImage", "normalisation", "prepare"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("PIL") is None:
        raise missing("a prompt with images", "Pillow", "images")
    from milepost.images import patches

    return getattr(patches, name)
