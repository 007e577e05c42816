"""Reads a checkpoint's settings for preparing pictures, and refuses unsupported ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from milepost.checks import is_number
from milepost.errors import UnsupportedModelError
from milepost.images.settings import (
    FrameSampling,
    ImageSettings,
    ImageTiling,
    check_whole,
)
from milepost.models.folder import read_object, reading

NESTED = "processor_config.json"
"""A file that may hold the settings of an image processor and of a video processor."""
_PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen3VLImageProcessor",
)
_VIDEO_PROCESSORS = ("Qwen3VLVideoProcessor",)
_FLOATING_VIDEOS = ("NemotronH_Omni_Reasoning_V3VideoProcessor",)
_FLOATING_FRAMES = 128
"""Largest number of frames of a video for Nemotron, whose checkpoints name none."""
_TILED = ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")
_FLOATING = (
    "NemotronH_Omni_Reasoning_V3ImageProcessor",
    "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor",
)
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""Normalisation of CLIP (arXiv:2103.00020), Nemotron's default."""
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


def read_image_settings(folder: Path) -> ImageSettings:
    """Reads the settings of the folder's image processor: `preprocessor_config.json`, or the part
    `image_processor` of `processor_config.json`. Without either, they are Qwen3.5's. Raises
    UnsupportedModelError or ConfigError, naming file and setting."""
    for path, raw in _parts(folder, *_IMAGE_FILE):
        read = _READERS.get(str(raw.get(_IMAGE_TYPE)))
        if read is not None:
            with reading(path):
                return read(raw)
    return ImageSettings(**_find(folder, *_IMAGE_FILE, _PROCESSORS))


def read_video_settings(folder: Path) -> ImageSettings:
    """Reads the settings of the folder's video processor, whose limits are those of all frames
    together: `video_preprocessor_config.json`, or the part `video_processor` of
    `processor_config.json`. See `read_image_settings`."""
    images = read_image_settings(folder)
    if images.keeps_overshoot:
        return _read_floating_video(folder, images)
    settings = _find(folder, *_VIDEO_FILE, _VIDEO_PROCESSORS)
    return ImageSettings(**{"min_pixels": 4096, "max_pixels": 25_165_824} | settings)


def read_frame_sampling(folder: Path) -> FrameSampling:
    """Reads how many frames of a video are taken, from the file of `read_video_settings`."""
    defaults = FrameSampling()
    if read_image_settings(folder).keeps_overshoot:
        defaults = FrameSampling(max_frames=_FLOATING_FRAMES)
    found = next(_parts(folder, *_VIDEO_FILE), None)
    if found is None:
        return defaults
    path, raw = found
    with reading(path):
        if raw.get("cap_pixels_per_frame"):
            raise UnsupportedModelError("cap_pixels_per_frame=True is not supported")
        names = [field.name for field in fields(FrameSampling)]
        return replace(defaults, **{name: raw[name] for name in names if raw.get(name) is not None})


def _read_floating_video(folder: Path, images: ImageSettings) -> ImageSettings:
    """Reads Nemotron's settings of videos, whose frames have one size each; what is not named is as
    for images."""
    path, raw = next(_parts(folder, *_VIDEO_FILE), (folder, {}))
    with reading(path):
        kind = raw.get("video_processor_type")
        if kind not in (None, *_FLOATING_VIDEOS):
            raise UnsupportedModelError(
                f"video_processor_type={kind!r} is not supported; supported is "
                f"{_FLOATING_VIDEOS[0]}"
            )
        only = {"downsample_ratio": (None, 0.5), "video_maintain_aspect_ratio": (None, True)}
        _check_only(raw, {**_ONLY, **only, "patch_size": (None, images.patch_size)})
        most = raw.get("video_target_num_patches", 1024)
        check_whole("video_target_num_patches", most, 2**16)
        colours = {"image_mean": raw.get("norm_mean"), "image_std": raw.get("norm_std")}
        return replace(images, temporal_patch_size=2, frame_patches=most, **_values_of(colours))


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
        check_whole(name, value, 256)
    least, most = raw.get("min_image_tokens", 64), raw.get("max_image_tokens", 256)
    for name, value in (("min_image_tokens", least), ("max_image_tokens", most)):
        check_whole(name, value, 2**16)
    named = {
        "side": "tile_size",
        "least": "min_tiles",
        "most": "max_tiles",
        "has_thumbnail": "use_thumbnail",
        "tolerance": "max_pixels_tolerance",
    }
    settings = {name: raw[key] for name, key in named.items() if raw.get(key) is not None}
    pixels = (patch * merge) ** 2
    return ImageSettings(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=1,
        min_pixels=least * pixels,
        max_pixels=most * pixels,
        has_rows=False,
        is_tiled=True,
        tiling=ImageTiling(**settings) if raw.get("do_image_splitting", True) else None,
        **_values_of(raw),
    )


def _read_floating(raw: Mapping[str, Any]) -> ImageSettings:
    """Reads Nemotron's settings, which count in patches. The budget of all images of a call, which
    `max_model_len` sets, must leave each its `max_num_patches`."""
    _check_only(raw, {**_ONLY, "downsample_ratio": (None, 0.5)})
    least, most = raw.get("min_num_patches", 1024), raw.get("max_num_patches", 13_312)
    side, budget = raw.get("patch_size", 16), raw.get("max_model_len", 16_384)
    for name, value, limit in (
        ("min_num_patches", least, 2**18),
        ("max_num_patches", most, 2**18),
        ("patch_size", side, 256),
        ("max_model_len", budget, 2**31),
    ):
        check_whole(name, value, limit)
    if (budget - 4) * 4 < most:
        raise UnsupportedModelError(
            f"max_model_len={budget} with max_num_patches={most} is not supported; supported is "
            f"{-(-most // 4) + 4} or more"
        )
    published = {"image_mean": raw.get("norm_mean"), "image_std": raw.get("norm_std")}
    colours = {name: raw.get(name) or published[name] or _CLIP[name] for name in _CLIP}
    return ImageSettings(
        patch_size=side,
        temporal_patch_size=1,
        min_pixels=least * side**2,
        max_pixels=most * side**2,
        has_rows=False,
        is_tiled=True,
        keeps_overshoot=True,
        **_values_of({**raw, **colours}),
    )


_READERS = {**dict.fromkeys(_TILED, _read_tiled), **dict.fromkeys(_FLOATING, _read_floating)}
"""Type of a processor -> what reads its settings, for those that Qwen's do not share."""


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
    settings = {name: raw[name] for name in names if raw.get(name) is not None}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = settings.get(name, size.get(edge, size.get(name)))
        if value is not None:
            settings[name] = value
    return settings | _values_of(raw)


def _values_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that make numbers of bytes, where they differ from the defaults."""
    settings: dict[str, Any] = {}
    if raw.get("rescale_factor") is not None:
        settings["rescale_factor"] = raw["rescale_factor"]
    for name, key in (("mean", "image_mean"), ("std", "image_std")):
        if raw.get(key) is not None:
            settings[name] = _colours(key, raw[key])
    factor = settings.get("rescale_factor", 1 / 255)
    if not is_number(factor) or not 0 < factor <= 1:
        raise UnsupportedModelError(f"rescale_factor={factor!r} is no number above 0, up to 1")
    if 0 in settings.get("std", ()):
        raise UnsupportedModelError(f"image_std={raw['image_std']!r} holds a zero")
    return settings


def _colours(name: str, value: object) -> tuple[float, float, float]:
    """Returns one number per channel; a single one stands for all three."""
    values = value if isinstance(value, list) else [value] * 3
    numbers = [float(each) for each in values if is_number(each) and abs(each) <= 1e3]
    if not len(numbers) == len(values) == 3:
        raise UnsupportedModelError(f"{name}={value!r} is no list of 3 numbers")
    return (numbers[0], numbers[1], numbers[2])
