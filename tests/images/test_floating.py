"""Pictures for Nemotron's towers: sizes and values beside those of transformers' processor."""

from __future__ import annotations

import ast
import json
import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st

from milepost.errors import ConfigError, InvalidPromptError, UnsupportedModelError
from milepost.images import ImageSettings, read_image_settings
from milepost.images.resampling import resize_bicubic
from milepost.images.sizes import resized_in_patches
from milepost.images.tiles import prepare_tiles
from tests.images.pictures import encoded, picture
from tests.numbers import relative_error

CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SETTINGS = ImageSettings(
    temporal_patch_size=1,
    min_pixels=1024 * 256,
    max_pixels=13_312 * 256,
    mean=CLIP[0],
    std=CLIP[1],
    has_rows=False,
    is_tiled=True,
    keeps_overshoot=True,
)
LIMITS = [(1024, 13_312), (1024, 1024), (16, 96), (1000, 1001)]
"""Fewest patches and most."""


@cache
def reference(name):
    """Returns a function of transformers' processor, whose module needs torchvision as it is
    imported; the function does not."""
    found = find_spec("transformers.models.nemotron_h_omni")
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no nemotron_h_omni")
    path = Path(found.origin).parent / "image_processing_nemotron_h_omni.py"
    nodes = ast.parse(path.read_text()).body
    own = [each for each in nodes if isinstance(each, ast.FunctionDef) and each.name == name]
    names = {"math": math}
    exec(compile(ast.Module(own, []), str(path), "exec"), names)
    return names[name]


@given(st.integers(16, 4000), st.integers(16, 4000), st.sampled_from(LIMITS))
def test_sizes_are_those_of_transformers_processor(height, width, limits):
    # With few patches, the reference passes the limit of long pictures or divides by zero.
    most = 200 if limits in LIMITS[:2] else 20
    assume(max(height, width) <= most * min(height, width))
    rows, columns = reference("get_patch_grid_size")(height, width, 16, 2, *limits)
    own = resized_in_patches(height, width, 16, 2, limits)
    if rows * columns <= limits[1]:
        assert own == (16 * rows, 16 * columns)
    else:  # the reference passes a limit that is near the other
        assert limits == LIMITS[-1]
        assert own[0] * own[1] <= 256 * limits[1]


@pytest.mark.parametrize("size", [(480, 640), (100, 90), (1500, 700), (512, 1024)])
def test_patches_are_those_of_transformers_processor(size):
    """Within 1e-5: torch's own floats differ by as much from float64, and between CPUs."""
    pixels = np.array(picture(*size))
    rows, columns = reference("get_patch_grid_size")(*size, 16, 2, 1024, 13_312)
    values = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    values = F.interpolate(
        values, (16 * rows, 16 * columns), mode="bicubic", align_corners=False, antialias=True
    )
    mean, std = (255 * torch.tensor(each)[:, None, None] for each in CLIP)
    wanted = reference("convert_image_to_patches")((values - mean) / std, 16)[0]
    (tile,) = prepare_tiles(picture(*size), SETTINGS)
    assert tile.image.grid == (1, rows, columns)
    own = tile.image.rows.view(np.float32).reshape(rows // 2, columns // 2, 2, 2, -1)
    own = torch.from_numpy(own).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    assert relative_error(own, wanted) < 1e-5
    assert (own - wanted).abs().max() < 1e-4


def test_resized_values_are_torchs():
    """Also where the kernel overshoots, and where a side stays as it is."""
    random = np.random.default_rng(0)
    sizes = random.integers(2, 300, (40, 4)).tolist()
    for height, width, rows, columns in [*sizes, (30, 40, 30, 80), (30, 40, 60, 40)]:
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        channels = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
        wanted = F.interpolate(channels, size=[rows, columns], mode="bicubic", antialias=True)
        own = resize_bicubic(pixels, (rows, columns))
        assert own.dtype == np.float32
        assert np.abs(own - wanted[0].permute(1, 2, 0).numpy()).max() < 3e-4
    assert own.min() < 0
    assert own.max() > 255


def test_equal_pixels_are_one_picture_and_others_another():
    pictures = [picture(100, 90, 1), encoded(picture(100, 90, 1)), picture(100, 90, 2)]
    first, same, other = (prepare_tiles(each, SETTINGS)[0].image for each in pictures)
    assert first.identity == same.identity != other.identity
    assert first.num_tokens == first.num_positions == first.grid[1] * first.grid[2] // 4
    low = prepare_tiles(pictures[0], SETTINGS, max_pixels=256 * 1024)[0].image
    assert low.num_tokens <= 256
    assert low.rows.shape[1] == 4 * 3 * 16**2


def test_hostile_files_are_refused():
    for file in (b"", b"GIF89a", encoded(picture(64, 64))[:100], encoded(picture(2, 900))):
        with pytest.raises(InvalidPromptError):
            prepare_tiles(file, SETTINGS)


@pytest.mark.parametrize("kind", ["NemotronH_Omni", "NemotronH_Nano_Omni"])
def test_settings_are_read(kind, tmp_path):
    def read(**own):
        named = {"image_processor_type": f"{kind}_Reasoning_V3ImageProcessor"}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(named | own))
        return read_image_settings(tmp_path)

    assert read() == SETTINGS
    assert SETTINGS.max_tokens == 3328
    assert read(norm_mean=list(CLIP[0]), norm_std=list(CLIP[1]), max_model_len=10**6) == SETTINGS
    assert read(norm_mean=[0, 0, 0], image_mean=[0.1, 0.2, 0.3]).mean == (0.1, 0.2, 0.3)
    assert read(min_num_patches=4).min_pixels == 1024
    for own, words in (
        ({"resample": 2}, "resample=2"),
        ({"downsample_ratio": 0.25}, "downsample_ratio=0.25"),
        ({"max_model_len": 3000}, "max_model_len=3000 with max_num_patches=13312"),
        ({"max_num_patches": 0}, "max_num_patches=0"),
        ({"norm_std": [0, 1, 1]}, "image_std"),
        ({"patch_size": "16"}, "patch_size='16'"),
    ):
        with pytest.raises((UnsupportedModelError, ConfigError), match=words):
            read(**own)
