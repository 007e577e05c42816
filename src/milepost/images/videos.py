"""Prepares the frames of a video: each group of frames that a patch spans is one picture of the
prompt, after a text with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from milepost.errors import InvalidPromptError
from milepost.images import decoding
from milepost.images.patches import PreparedImage, from_frames, resize
from milepost.images.settings import ImageSettings
from milepost.images.sizes import resized

MAX_FRAMES = 768
"""Largest number of frames of a video, as checkpoints are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPart:
    """Some frames of a video, and the text before them."""

    image: PreparedImage
    seconds: float
    """Mean of the first frame's time and the last one's."""

    @property
    def text(self) -> str:
        """The text before the frames, as checkpoints are trained on it."""
        return f"<{self.seconds:.1f} seconds>"


def prepare_video(
    frames: Sequence[bytes | Image.Image],
    times: Sequence[float],
    settings: ImageSettings,
    *,
    max_decoded: int = decoding.MAX_PIXELS,
) -> list[VideoPart]:
    """Prepares frames, given as files or pictures of Pillow's, with their times in seconds. The
    last frame is repeated until groups are full. `settings` are those of `read_video_settings`, and
    `max_decoded` limits the pixels of a frame. Raises InvalidPromptError."""
    each = settings.temporal_patch_size
    if not each <= len(frames) <= MAX_FRAMES:
        raise InvalidPromptError(
            f"the video has {len(frames)} frames: use {each} to {MAX_FRAMES}, or an image"
        )
    if len(times) != len(frames):
        raise InvalidPromptError(
            f"the video has {len(frames)} frames and {len(times)} times: use one time for each"
        )
    upright = [decoding.open_picture(frame, max_decoded) for frame in frames]
    sizes = {picture.size for picture in upright}
    if len(sizes) > 1:
        (width, height), (other_width, other_height), *_ = sorted(sizes)
        raise InvalidPromptError(
            f"the video has frames of {width} x {height} and of {other_width} x {other_height} "
            "pixels: use one size"
        )
    ((width, height),) = sizes
    size = _fit(height, width, len(frames), settings)
    pixels = [resize(picture, size) for picture in upright]
    padding = -len(frames) % each
    pixels += pixels[-1:] * padding
    padded = [*times, *times[-1:] * padding] if padding else list(times)
    return [
        VideoPart(
            image=from_frames(pixels[first : first + each], settings),
            seconds=(padded[first] + padded[first + each - 1]) / 2,
        )
        for first in range(0, len(pixels), each)
    ]


def _fit(height: int, width: int, num_frames: int, settings: ImageSettings) -> tuple[int, int]:
    """Returns the size of all frames. Those smaller than a token are enlarged first."""
    if min(height, width) < settings.unit:
        factor = max(settings.unit / height, settings.unit / width)
        height, width = int(height * factor), int(width * factor)
    each = settings.temporal_patch_size
    return resized(height, width, *settings.limits, num_frames=num_frames, frames_each=each)
