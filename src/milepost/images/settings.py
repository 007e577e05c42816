"""Settings of a checkpoint's image and video processors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from milepost.checks import is_number
from milepost.errors import ConfigError, UnsupportedModelError

MAX_FRAMES = 768
"""Largest number of frames of a video, as checkpoints are trained on."""
MAX_FPS = 1000
"""Largest number of frames a second that are taken of a video."""
_MOST_PIXELS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTiling:
    """How large pictures are cut into squares; the defaults are those of LFM2-VL."""

    side: int = 512
    """Pixels of a square's side."""
    least: int = 2
    most: int = 10
    """Fewest and most squares of a picture."""
    has_thumbnail: bool = True
    """Whether the whole picture follows its squares, made small."""
    tolerance: float = 2.0
    """A picture is cut if it has more pixels than `max_pixels` times this."""

    def __post_init__(self) -> None:
        for name, most in (("side", 2**13), ("least", 256), ("most", 256)):
            check_whole(f"tiles: {name}", getattr(self, name), most)
        if self.least > self.most:
            raise ConfigError(f"min_tiles={self.least} is more than max_tiles={self.most}")
        if not is_number(self.tolerance) or not 0 < self.tolerance <= 1e6:
            raise ConfigError(f"max_pixels_tolerance={self.tolerance!r} is no number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Settings of a checkpoint's image processor; the defaults are those of Qwen3.5."""

    patch_size: int = 16
    """Pixels of a patch's side."""
    merge_size: int = 2
    """Patches of a token's side."""
    temporal_patch_size: int = 2
    """Number of frames of a patch."""
    min_pixels: int = 65_536
    """Smallest area that a picture is resized to, in pixels; the setting `shortest_edge`."""
    max_pixels: int = 16_777_216
    """Largest area that a picture is resized to, in pixels; the setting `longest_edge`."""
    rescale_factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    has_rows: bool = True
    """Whether a picture's tokens have rows and columns for rotary positions (M-RoPE); else they
    follow one another like text."""
    is_tiled: bool = False
    """Whether pictures are prepared by `tiles`: as processors on torchvision do, with texts around
    them, and perhaps cut."""
    tiling: ImageTiling | None = None
    frame_patches: int | None = None
    """Patches that a frame of a video is resized to, nearly and at most; None if the limits are
    those of all frames together."""
    keeps_overshoot: bool = False
    """Whether pictures are resized to floats, which may lie outside of a byte's values."""

    def __post_init__(self) -> None:
        for name, most in (("patch_size", 256), ("merge_size", 16), ("temporal_patch_size", 16)):
            check_whole(name, getattr(self, name), most)
        for name in ("min_pixels", "max_pixels"):
            check_whole(name, getattr(self, name), _MOST_PIXELS)
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}"
            )
        if self.max_pixels < self.unit**2:
            raise ConfigError(
                f"max_pixels={self.max_pixels} is less than one token: {self.unit}x{self.unit}"
            )
        if self.tiling is not None and self.tiling.side % self.unit:
            raise UnsupportedModelError(
                f"tile_size={self.tiling.side} is no multiple of a token's side, {self.unit}"
            )

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    @property
    def limits(self) -> tuple[int, int, int]:
        """The unit, and the smallest and largest area, as `sizes.resized` takes them."""
        return self.unit, self.min_pixels, self.max_pixels

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that a picture, or a square of one, has."""
        side = 0 if self.tiling is None else self.tiling.side // self.unit
        return max(self.max_pixels // self.unit**2, side**2)

    def with_pixels(self, min_pixels: int | None, max_pixels: int | None) -> ImageSettings:
        """Returns the settings with other limits. Raises ConfigError if they contradict."""
        least = self.min_pixels if min_pixels is None else min_pixels
        most = self.max_pixels if max_pixels is None else max_pixels
        return replace(self, min_pixels=least, max_pixels=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """How many frames of a video are taken; the defaults are those of Qwen3.5."""

    fps: float = 2.0
    """Frames a second."""
    min_frames: int = 4
    max_frames: int = 768

    def __post_init__(self) -> None:
        if not is_number(self.fps) or not 0 < self.fps <= MAX_FPS:
            raise ConfigError(f"fps={self.fps!r} is no number above 0, up to {MAX_FPS}")
        for name in ("min_frames", "max_frames"):
            check_whole(name, getattr(self, name), 2**16)

    def chosen(self, num_frames: int, rate: float) -> list[int]:
        """Returns the indices of the frames to take, evenly from the first to the last, of a video
        with `rate` frames a second."""
        wanted = int(num_frames / rate * self.fps)
        count = min(max(wanted, self.min_frames), self.max_frames, num_frames)
        if count == 1:
            return [0]
        step = (num_frames - 1) / (count - 1)
        return [*(round(index * step) for index in range(count - 1)), num_frames - 1]


def check_whole(name: str, value: object, most: int) -> None:
    """Raises ConfigError for anything but a whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name}={value!r} is no whole number from 1 to {most}")
