"""Prepares the frames of a video: each group of frames that a patch spans is one picture of the
prompt, after a text with its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from milepost.errors import InvalidPromptError
from milepost.images import decoding
from milepost.images.containers import VideoFile
from milepost.images.headers import container_of
from milepost.images.patches import PreparedImage, from_frames, normalised, resize
from milepost.images.resampling import PixelValues, resize_bicubic
from milepost.images.settings import MAX_FRAMES, FrameSampling, ImageSettings
from milepost.images.sizes import resized, resized_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGroup:
    """Some frames of a video, and the text before them."""

    image: PreparedImage
    seconds: float
    """Mean of the first frame's time and the last one's."""
    text: str
    """The text before the frames, as checkpoints are trained on it."""


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
    return _parts(_pixels(upright, len(frames), settings), list(times), settings)


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
    shown = enumerate(decoding.Animation(data, max_decoded).frames())
    frames = (frame for index, (frame, _) in shown if index in chosen)
    pixels = _pixels(frames, len(chosen), settings)
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
    pixels: list[PixelValues] = []
    chosen: list[int] = []
    while not chosen or len(pixels) < len(chosen):  # a header may name more frames than there are
        chosen = sampling.chosen(video.num_frames, video.rate)
        pixels = _pixels(video.frames(chosen), len(chosen), settings)
    frame_s = 1 / video.rate
    if settings.frame_patches is not None:
        frame_s = int(1000 * frame_s) / 1000  # as the model's processor rounds it
    return _parts(pixels, [index * frame_s for index in chosen], settings)


def _parts(
    pixels: list[PixelValues], times: list[float], settings: ImageSettings
) -> list[FrameGroup]:
    """Groups resized frames; the last one is repeated until groups are full."""
    each = settings.temporal_patch_size
    pixels = pixels + pixels[-1:] * (-len(pixels) % each)
    groups = []
    for first in range(0, len(pixels), each):
        group_times = times[first : first + each]
        seconds = (group_times[0] + group_times[-1]) / 2
        counts_frames = settings.frame_patches is not None
        text = _all_times(group_times, first) if counts_frames else f"<{seconds:.1f} seconds>"
        image = from_frames(pixels[first : first + each], settings)
        groups.append(FrameGroup(image=image, seconds=seconds, text=text))
    return groups


def _all_times(times: Sequence[float], first: int) -> str:
    """Returns the text before a group of frames of Nemotron's, after the `first` ones."""
    texts = [f"frame {first + k} sampled at {at:.2f} seconds" for k, at in enumerate(times, 1)]
    start = "\n" if first else ""
    return f"{start}F{' and '.join(texts)[1:]}: "


def _pixels(
    frames: Iterable[Image.Image], num_frames: int, settings: ImageSettings
) -> list[PixelValues]:
    """Returns the pixels of frames, resized to what suits the first of them."""
    pixels: list[PixelValues] = []
    size = None
    for frame in frames:
        size = size or _fit(frame.height, frame.width, num_frames, settings)
        if settings.keeps_overshoot:
            pixels.append(normalised(resize_bicubic(np.asarray(frame), size), settings))
        else:
            pixels.append(resize(frame, size))
    return pixels


def _fit(height: int, width: int, num_frames: int, settings: ImageSettings) -> tuple[int, int]:
    """Returns the size of all frames. Qwen's smaller than a token are enlarged first."""
    if settings.frame_patches is not None:
        side, merge = settings.patch_size, settings.merge_size
        return resized_frame(height, width, side, merge, settings.frame_patches)
    if min(height, width) < settings.unit:
        factor = max(settings.unit / height, settings.unit / width)
        height, width = int(height * factor), int(width * factor)
    each = settings.temporal_patch_size
    return resized(height, width, *settings.limits, num_frames=num_frames, frames_each=each)
