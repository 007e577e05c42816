"""Decodes videos in MP4, QuickTime, WebM and Matroska files, with the FFmpeg of OpenCV's wheel.

These are untrusted input, like pictures. A file is opened as the format that `headers.container_of`
finds, and FFmpeg opens no other file and no URL. Pixels of all frames are counted before frames are
read, frames are decoded on one thread, and FFmpeg's messages are not repeated to callers. How long
decoding takes is not bounded here: a process that can be ended does that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from threading import Lock
from typing import Any

from PIL import Image

from milepost.errors import InvalidPromptError, how_to_install
from milepost.images.decoding import MAX_PIXELS, refuse_size
from milepost.images.headers import container_of, shown_share

CODECS = "H.264, H.265, VP8, VP9 and MPEG-4"
_TAGS = b"avc1 avc3 h264 hvc1 hev1 hevc vp80 vp08 vp90 vp09 mp4v fmp4".split()
"""The names of these codecs in files, in lower case."""
_FORMATS = {"MP4": "mov", "WebM": "matroska"}
_OPTIONS = {
    "protocol_whitelist": "pipe",
    "codec_whitelist": "h264,hevc,vp8,libvpx,vp9,libvpx-vp9,mpeg4",
}
"""Options of FFmpeg while it looks into a file, by the names of its documentation
(ffmpeg-formats)."""
_VIDEO_TIMES = 256
"""Pixels of all frames that are decoded at most, as a multiple of one picture's: five minutes of
1080p at 25 frames a second, with the default."""
_MOST_RATE = 1000.0
_LEAST_SHARE = 0.9
"""Share of the frames named by a header below which the file counts as cut short. Headers without a
count are estimated from the duration, and MP4 files may name frames that they do not show."""
_environment = Lock()


def can_decode() -> bool:
    """Whether OpenCV is installed."""
    return find_spec("cv2") is not None


class _FileBytes(BytesIO):
    """The bytes of a file. OpenCV crashes if its source raises an exception."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Goes to an offset. Returns -1 for an invalid one, as damaged files have them."""
        try:
            return super().seek(offset, whence)
        except (OSError, OverflowError, ValueError):
            return -1


class VideoFile:
    """A video's frames. Raises InvalidPromptError for anything but a video of two or more frames,
    each of at most `max_pixels`."""

    def __init__(self, data: bytes, max_pixels: int = MAX_PIXELS) -> None:
        kind = container_of(data)
        assert kind is not None, "callers ask for the container"
        if not can_decode():
            raise InvalidPromptError(
                f"the video is of the kind {kind}, and OpenCV, which decodes it, is missing: "
                f"{how_to_install('videos')}, or send an animated GIF, WebP or PNG, or frames"
            )
        self._kind, self._data, self._max_pixels = kind, data, max_pixels
        self.num_frames = 0
        """Number of frames that the file names, or has."""
        self.rate = 0.0
        """Frames a second."""
        self._is_counted = False
        with self._reading() as capture:
            self._measure(capture)

    def frames(self, chosen: Sequence[int]) -> Iterator[Image.Image]:
        """Yields the frames at these indices, in ascending order, in RGB. If the file ends before
        the last, sets `num_frames` to the actual number and stops."""
        import cv2

        wanted = set(chosen)
        with self._reading() as capture:
            for index in range(chosen[-1] + 1):
                if not capture.grab():
                    self._note_end(index)
                    return
                if index in wanted:
                    is_read, pixels = capture.retrieve()
                    if not is_read or pixels is None or pixels.ndim != 3:
                        raise self._unreadable()
                    refuse_size((pixels.shape[1], pixels.shape[0]), self._max_pixels)
                    yield Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """Opens the file, and closes it again."""
        import cv2

        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
        settings = [cv2.CAP_PROP_N_THREADS, 1, cv2.CAP_PROP_HW_ACCELERATION, 0]
        # OpenCV reads the source until it is released, and keeps no reference to it.
        source: Any = _FileBytes(self._data)
        capture = None
        try:
            with _ffmpeg_options(_OPTIONS | {"input_format": _FORMATS[self._kind]}):
                capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, settings)
            tag = int(capture.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF
            if not capture.isOpened() or tag.to_bytes(4, "little").lower() not in _TAGS:
                raise self._unreadable()
            yield capture
        except (cv2.error, MemoryError):
            raise self._unreadable() from None
        finally:
            if capture is not None:
                capture.release()

    def _measure(self, capture: Any) -> None:
        """Finds the number of frames and their rate."""
        import cv2

        width, height, count, rate = (
            capture.get(name)
            for name in (
                cv2.CAP_PROP_FRAME_WIDTH,
                cv2.CAP_PROP_FRAME_HEIGHT,
                cv2.CAP_PROP_FRAME_COUNT,
                cv2.CAP_PROP_FPS,
            )
        )
        size = int(width), int(height)
        refuse_size(size, self._max_pixels)
        most = _VIDEO_TIMES * self._max_pixels // (size[0] * size[1])
        if not 1 <= count < math.inf:
            count, rate = self._counted(capture, most, rate)
        if count > most:
            raise InvalidPromptError(
                f"the video has {count:.0f} frames of {size[0]} x {size[1]} pixels: at most "
                f"{most} of this size are decoded; make it smaller or shorter"
            )
        if count < 2:
            raise InvalidPromptError("the video has one frame: send it as an image")
        if not 0 < rate <= _MOST_RATE:
            raise InvalidPromptError(f"the video has {rate:g} frames a second: it is damaged")
        self.num_frames, self.rate = int(count), float(rate)

    def _counted(self, capture: Any, most: int, rate: float) -> tuple[int, float]:
        """Returns the number of frames of a file that was written as a stream, and their rate by
        the time of the last one."""
        import cv2

        count, last_ms = 0, 0.0
        while count <= most and capture.grab():
            count, last_ms = count + 1, capture.get(cv2.CAP_PROP_POS_MSEC)
        return count, 1000 * (count - 1) / last_ms if last_ms > 0 else rate

    def _note_end(self, num_frames: int) -> None:
        share = shown_share(self._data) if self._kind == "MP4" else 1.0
        least = _LEAST_SHARE * int(share * self.num_frames)
        if self._is_counted or num_frames < max(2, least):
            raise self._unreadable()
        self.num_frames, self._is_counted = num_frames, True

    def _unreadable(self) -> InvalidPromptError:
        return InvalidPromptError(
            f"the {self._kind} video of {len(self._data)} bytes cannot be decoded: it is damaged, "
            f"cut short, too large for the memory, or its codec is none of {CODECS}"
        )


@contextmanager
def _ffmpeg_options(options: Mapping[str, str]) -> Iterator[None]:
    """Hands options to FFmpeg. OpenCV reads them from the environment as it opens a file, and has
    no other way."""
    joined = "|".join(f"{name};{value}" for name, value in options.items())
    variables = {"OPENCV_FFMPEG_CAPTURE_OPTIONS": joined, "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    with _environment:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
