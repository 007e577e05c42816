"""Prepares the frames of a video: each group of frames that a patch spans is one picture of the
prompt, after a text with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from milepost.errors import InvalidPromptError
from milepost.images import decoding
from milepost.images.containers import VideoFile
from milepost.images.headers import container_of
from milepost.images.patches import PreparedImage, from_frames, resize
from milepost.images.settings import MAX_FRAMES, FrameSampling, ImageSettings
from milepost.images.sizes import resized


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGroup:
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
) -> list[FrameGroup]:
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
    return _parts([resize(picture, size) for picture in upright], list(times), settings)


def prepare_animation(
    data: bytes,
    settings: ImageSettings,
    sampling: FrameSampling,
    *,
    max_decoded: int = decoding.MAX_PIXELS,
) -> list[FrameGroup]:
    """Prepares the frames of an animated GIF, WebP or PNG file that `sampling` takes, each with the
    time at which it is first shown. Raises InvalidPromptError."""
    times: list[float] = []
    end = 0.0
    for _, shown_s in decoding.Animation(data, max_decoded).frames():
        times.append(end)
        end += shown_s
    chosen = sampling.chosen(len(times), len(times) / end)
    pixels: list[NDArray[np.uint8]] = []
    size = None
    for index, (frame, _) in enumerate(decoding.Animation(data, max_decoded).frames()):
        if index in chosen:
            size = size or _fit(frame.height, frame.width, len(chosen), settings)
            pixels.append(resize(frame, size))
    return _parts(pixels, [times[index] for index in chosen], settings)


def prepare_file(
    data: bytes,
    settings: ImageSettings,
    sampling: FrameSampling,
    *,
    max_decoded: int = decoding.MAX_PIXELS,
) -> list[FrameGroup]:
    """Prepares the frames that `sampling` takes of a video: an animation, or a file that OpenCV
    decodes. Raises InvalidPromptError."""
    if container_of(data) is None:
        return prepare_animation(data, settings, sampling, max_decoded=max_decoded)
    video = VideoFile(data, max_decoded)
    pixels: list[NDArray[np.uint8]] = []
    chosen: list[int] = []
    while not chosen or len(pixels) < len(chosen):  # a header may name more frames than there are
        chosen, pixels = sampling.chosen(video.num_frames, video.rate), []
        size = None
        for frame in video.frames(chosen):
            size = size or _fit(frame.height, frame.width, len(chosen), settings)
            pixels.append(resize(frame, size))
    return _parts(pixels, [index / video.rate for index in chosen], settings)


def _parts(
    pixels: list[NDArray[np.uint8]], times: list[float], settings: ImageSettings
) -> list[FrameGroup]:
    """Groups resized frames; the last one is repeated until groups are full."""
    each = settings.temporal_patch_size
    padding = -len(pixels) % each
    pixels, times = pixels + pixels[-1:] * padding, times + times[-1:] * padding
    return [
        FrameGroup(
            image=from_frames(pixels[first : first + each], settings),
            seconds=(times[first] + times[first + each - 1]) / 2,
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
