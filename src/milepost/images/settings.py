"""Reads a checkpoint's settings for preparing pictures, and refuses unsupported ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from milepost.errors import ConfigError, UnsupportedModelError
from milepost.models.files import read_object, reading

NESTED = "processor_config.json"
"""A file that may hold the settings of an image processor and of a video processor."""
_MOST_PIXELS = 2**26
_PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen3VLImageProcessor",
)
_VIDEO_PROCESSORS = ("Qwen3VLVideoProcessor",)
_TILED = ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")
_IMAGE_FILE, _IMAGE_TYPE = ("preprocessor_config.json", "image_processor"), "image_processor_type"
_VIDEO_FILE = "video_preprocessor_config.json", "video_processor"
_ONLY: dict[str, tuple[Any, ...]] = {
    "do_resize": (None, True),
    "do_rescale": (None, True),
    "do_normalize": (None, True),
    "do_convert_rgb": (None, True),
    "resample": (None, 3),
}
"""Setting -> the values that are supported. 3 is Pillow's number of bicubic."""


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
            _check_whole(f"tiles: {name}", getattr(self, name), most)
        if self.least > self.most:
            raise ConfigError(f"min_tiles={self.least} is more than max_tiles={self.most}")
        if not _is_number(self.tolerance) or not 0 < self.tolerance <= 1e6:
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
    """Whether pictures are prepared by `tiles`: bilinearly, with labels, and perhaps cut."""
    tiling: ImageTiling | None = None

    def __post_init__(self) -> None:
        for name, most in (("patch_size", 256), ("merge_size", 16), ("temporal_patch_size", 16)):
            _check_whole(name, getattr(self, name), most)
        for name in ("min_pixels", "max_pixels"):
            _check_whole(name, getattr(self, name), _MOST_PIXELS)
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
        """Most tokens that a picture, or a square of one, has."""
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
        if not _is_number(self.fps) or not 0 < self.fps <= 1000:
            raise ConfigError(f"fps={self.fps!r} is no number above 0, up to 1000")
        for name in ("min_frames", "max_frames"):
            _check_whole(name, getattr(self, name), 2**16)

    def chosen(self, num_frames: int, rate: float) -> list[int]:
        """Returns the indices of the frames to take, evenly from the first to the last, of a video
        with `rate` frames a second."""
        wanted = int(num_frames / rate * self.fps)
        count = min(max(wanted, self.min_frames), self.max_frames, num_frames)
        if count == 1:
            return [0]
        step = (num_frames - 1) / (count - 1)
        return [*(round(index * step) for index in range(count - 1)), num_frames - 1]


def read_image_settings(folder: Path) -> ImageSettings:
    """Reads the settings of the folder's image processor: `preprocessor_config.json`, or the part
    `image_processor` of `processor_config.json`. Without either, they are Qwen3.5's. Raises
    UnsupportedModelError or ConfigError, naming file and setting."""
    parts = _parts(folder, *_IMAGE_FILE)
    tiled = next(((path, raw) for path, raw in parts if raw.get(_IMAGE_TYPE) in _TILED), None)
    if tiled is None:
        return ImageSettings(**_find(folder, *_IMAGE_FILE, _PROCESSORS))
    with reading(tiled[0]):
        return _read_tiled(tiled[1])


def read_video_settings(folder: Path) -> ImageSettings:
    """Reads the settings of the folder's video processor, whose limits are those of all frames
    together: `video_preprocessor_config.json`, or the part `video_processor` of
    `processor_config.json`. See `read_image_settings`."""
    own = _find(folder, *_VIDEO_FILE, _VIDEO_PROCESSORS)
    return ImageSettings(**{"min_pixels": 4096, "max_pixels": 25_165_824} | own)


def read_frame_sampling(folder: Path) -> FrameSampling:
    """Reads how many frames of a video are taken, from the file of `read_video_settings`."""
    found = next(_parts(folder, *_VIDEO_FILE), None)
    if found is None:
        return FrameSampling()
    path, raw = found
    with reading(path):
        if raw.get("cap_pixels_per_frame"):
            raise UnsupportedModelError("cap_pixels_per_frame=True is not supported")
        names = [field.name for field in fields(FrameSampling)]
        return FrameSampling(**{name: raw[name] for name in names if raw.get(name) is not None})


def _find(folder: Path, file: str, part: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, by the names of `ImageSettings`."""
    for path, raw in _parts(folder, file, part):
        with reading(path):
            return _read(raw, f"{part}_type", kinds)
    return {}


def _parts(folder: Path, file: str, part: str) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yields the settings in the folder's files. The first ones count."""
    for name in (file, NESTED):
        path = folder / name
        if not path.exists():
            continue
        raw = read_object(path)
        if name != NESTED:
            yield path, raw
        elif isinstance(raw.get(part), Mapping):
            yield path, raw[part]


def _read_tiled(raw: Mapping[str, Any]) -> ImageSettings:
    """Reads LFM2-VL's settings, which count in tokens."""
    only = {**_ONLY, "resample": (None, 2), "do_resize": (None, True, False)}
    _check_only(raw, only)
    patch, merge = raw.get("encoder_patch_size", 16), raw.get("downsample_factor", 2)
    for name, value in (("encoder_patch_size", patch), ("downsample_factor", merge)):
        _check_whole(name, value, 256)
    least, most = raw.get("min_image_tokens", 64), raw.get("max_image_tokens", 256)
    for name, value in (("min_image_tokens", least), ("max_image_tokens", most)):
        _check_whole(name, value, 2**16)
    named = {
        "side": "tile_size",
        "least": "min_tiles",
        "most": "max_tiles",
        "has_thumbnail": "use_thumbnail",
        "tolerance": "max_pixels_tolerance",
    }
    own = {name: raw[key] for name, key in named.items() if raw.get(key) is not None}
    pixels = (patch * merge) ** 2
    return ImageSettings(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=1,
        min_pixels=least * pixels,
        max_pixels=most * pixels,
        has_rows=False,
        is_tiled=True,
        tiling=ImageTiling(**own) if raw.get("do_image_splitting", True) else None,
        **_values_of(raw),
    )


def _check_only(raw: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in only.items():
        if raw.get(name) not in values:
            raise UnsupportedModelError(
                f"{name}={raw[name]!r} is not supported; supported is {values[-1]!r}"
            )


def _read(raw: Mapping[str, Any], key: str, kinds: Sequence[str]) -> dict[str, Any]:
    kind = raw.get(key)
    if kind not in (None, *kinds):
        raise UnsupportedModelError(
            f"{key}={kind!r} is not supported; supported are {', '.join(kinds)}"
        )
    _check_only(raw, _ONLY)
    size = raw.get("size")
    size = size if isinstance(size, Mapping) else {}
    names = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    own = {name: raw[name] for name in names if raw.get(name) is not None}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = own.get(name, size.get(edge, size.get(name)))
        if value is not None:
            own[name] = value
    return own | _values_of(raw)


def _values_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that make numbers of bytes, where they differ from the defaults."""
    own: dict[str, Any] = {}
    if raw.get("rescale_factor") is not None:
        own["rescale_factor"] = raw["rescale_factor"]
    for name, key in (("mean", "image_mean"), ("std", "image_std")):
        if raw.get(key) is not None:
            own[name] = _colours(key, raw[key])
    factor = own.get("rescale_factor", 1 / 255)
    if not _is_number(factor) or not 0 < factor <= 1:
        raise UnsupportedModelError(f"rescale_factor={factor!r} is no number above 0, up to 1")
    if 0 in own.get("std", ()):
        raise UnsupportedModelError(f"image_std={raw['image_std']!r} holds a zero")
    return own


def _colours(name: str, value: object) -> tuple[float, float, float]:
    """Returns one number per channel; a single one stands for all three."""
    values = value if isinstance(value, list) else [value] * 3
    numbers = [float(each) for each in values if _is_number(each) and abs(each) <= 1e3]
    if not len(numbers) == len(values) == 3:
        raise UnsupportedModelError(f"{name}={value!r} is no list of 3 numbers")
    return (numbers[0], numbers[1], numbers[2])


def _check_whole(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name}={value!r} is no whole number from 1 to {most}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
