"""What a checkpoint says about its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import ConfigError, UnsupportedModelError
from milepost.images import ImageSettings, read_image_settings
from milepost.images.sizes import resized

PUBLISHED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def write(folder: Path, name: str = "preprocessor_config.json", **changes: Any) -> Path:
    (folder / name).write_text(json.dumps(PUBLISHED | changes))
    return folder


def test_published_settings_are_the_defaults(tmp_path: Path) -> None:
    assert read_image_settings(tmp_path) == ImageSettings()
    assert read_image_settings(write(tmp_path)) == ImageSettings()


def test_settings_nested_in_a_processors_are_read(tmp_path: Path) -> None:
    nested = json.dumps({"image_processor": PUBLISHED | {"size": {"longest_edge": 70_000}}})
    (tmp_path / "processor_config.json").write_text(nested)
    assert read_image_settings(tmp_path).max_pixels == 70_000
    write(tmp_path, size={"longest_edge": 80_000})
    assert read_image_settings(tmp_path).max_pixels == 80_000, "the flat file comes first"


def test_a_processor_without_pictures_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "X"}')
    assert read_image_settings(tmp_path) == ImageSettings()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"size": {}, "min_pixels": 4096, "max_pixels": 9216}, (4096, 9216)),
        ({"size": {"min_pixels": 4096, "max_pixels": 9216}}, (4096, 9216)),
        ({"size": None}, (65_536, 16_777_216)),
    ],
)
def test_other_spellings_of_the_limits_are_read(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    settings = read_image_settings(write(tmp_path, **changes))
    assert (settings.min_pixels, settings.max_pixels) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type='Siglip"),
        ({"do_resize": False}, "do_resize=False"),
        ({"do_convert_rgb": False}, "do_convert_rgb=False"),
        ({"resample": 2}, "resample=2"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"patch_size": "16"}, "patch_size='16'"),
        ({"merge_size": 2.0}, "merge_size=2.0"),
        ({"temporal_patch_size": 2**40}, "temporal_patch_size=1099511627776"),
        ({"size": {"longest_edge": 2**40}}, "max_pixels=1099511627776"),
        ({"size": {"longest_edge": 1000}, "min_pixels": 10}, "max_pixels=1000 is less than one"),
        ({"size": {"longest_edge": 4096}, "min_pixels": 5000}, "min_pixels=5000 is more than"),
        ({"image_mean": [0.5]}, r"image_mean=\[0.5\]"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std=.* holds a zero"),
        ({"image_std": "x"}, "image_std='x'"),
        ({"rescale_factor": 0}, "rescale_factor=0"),
        ({"rescale_factor": True}, "rescale_factor=True"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_image_settings(write(tmp_path, **changes))


def test_an_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"preprocessor_config\.json: resample=2"):
        read_image_settings(write(tmp_path, resample=2))
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_image_settings(tmp_path)


def test_limits_may_be_set_by_a_user() -> None:
    own = ImageSettings().with_pixels(None, 1_000_000)
    assert (own.min_pixels, own.max_pixels, own.max_tokens) == (65_536, 1_000_000, 976)
    with pytest.raises(ConfigError, match="min_pixels=65536 is more than max_pixels=2000"):
        ImageSettings().with_pixels(None, 2000)


@pytest.mark.parametrize(
    ("height", "width", "num_tokens"),
    [(480, 640, 300), (1080, 1920, 2040), (2160, 3840, 8160), (3024, 4032, 11844)],
)
def test_numbers_of_tokens_are_those_that_are_published(
    height: int, width: int, num_tokens: int
) -> None:
    rows, columns = resized(height, width, *ImageSettings().limits)
    assert rows * columns // 1024 == num_tokens


def test_halves_are_rounded_to_even_multiples() -> None:
    assert resized(80, 112, 32, 1024, 2**20) == (64, 128)
