"""Images in tiles: the pixels of torch's resizing bit for bit, and the grids of LFM2-VL's
processor."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from milepost.errors import ConfigError, InvalidPromptError, UnsupportedModelError
from milepost.images import ImageSettings, normalisation, read_image_settings
from milepost.images.resampling import resize_bilinear
from milepost.images.settings import ImageTiling
from milepost.images.tiles import THUMBNAIL, prepare_tiles
from tests.images.pictures import encoded, picture

SETTINGS = ImageSettings(
    temporal_patch_size=1,
    min_pixels=65536,
    max_pixels=262144,
    has_rows=False,
    is_tiled=True,
    tiling=ImageTiling(),
)
GRIDS = {
    (100, 200): (1, 1),
    (512, 512): (1, 1),
    (720, 730): (1, 1),
    (724, 724): (2, 2),
    (600, 1000): (2, 3),
    (800, 1000): (2, 3),
    (1080, 1920): (2, 4),
    (1500, 700): (4, 2),
    (2000, 150): (1, 1),
    (10, 900): (1, 1),
}
"""Height and width -> rows and columns of tiles, as transformers' processor cuts them."""


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="elsewhere torch resizes floats",
)
def test_resized_pixels_are_torchs_bit_for_bit():
    random = np.random.default_rng(0)
    for height, width, rows, columns in random.integers(1, 400, (60, 4)).tolist():
        given = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        channels = torch.from_numpy(given).permute(2, 0, 1)[None]
        wanted = F.interpolate(channels, size=[rows, columns], mode="bilinear", antialias=True)
        own = resize_bilinear(given, (rows, columns))
        assert np.array_equal(own, wanted[0].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("size", GRIDS)
def test_images_are_cut_as_transformers_cuts_them(size):
    tiles = prepare_tiles(picture(*size), SETTINGS)
    rows, columns = GRIDS[size]
    if rows * columns == 1:
        assert [each.label for each in tiles] == [""]
    else:
        labels = [
            f"<|img_row_{row}_col_{column}|>"
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        ]
        assert [each.label for each in tiles] == [*labels, THUMBNAIL]
        assert all(each.image.grid == (1, 32, 32) for each in tiles[:-1])
    own = tiles[-1].image
    assert own.num_tokens == own.num_positions == own.grid[1] * own.grid[2] // 4
    assert 64 <= own.num_tokens <= 256


@pytest.mark.parametrize("size", [(300, 400), (1080, 1920), (1500, 700)])
def test_rows_are_those_of_transformers_processor(size):
    """Where torchvision is installed, without which that cannot be imported."""
    pytest.importorskip("torchvision")
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    made = Lfm2VlImageProcessor()(picture(*size), return_tensors="pt")
    tiles, table = prepare_tiles(picture(*size), SETTINGS), normalisation(SETTINGS)
    assert len(tiles) == len(made["pixel_values"])
    for number, each in enumerate(tiles):
        down, across = (count // 2 for count in each.image.grid[1:])
        rows = each.image.rows.reshape(down, across, 2, 2, 3, -1).transpose(0, 2, 1, 3, 4, 5)
        own = table[np.arange(3)[:, None], rows.reshape(4 * down * across, 3, -1)]
        own = own.transpose(0, 2, 1).reshape(len(own), -1)
        assert np.array_equal(own, made["pixel_values"][number][: len(own)].numpy())


def test_tiles_show_the_places_that_their_labels_say():
    """Each quarter of the picture has one colour."""
    colours = np.zeros((1024, 1024, 3), np.uint8)
    for row in range(2):
        for column in range(2):
            part = colours[512 * row : 512 * (row + 1), 512 * column : 512 * (column + 1)]
            part[...] = 60 * (1 + 2 * row + column)
    tiles = prepare_tiles(Image.fromarray(colours), SETTINGS)
    for number, each in enumerate(tiles[:4]):
        assert set(each.image.rows.ravel().tolist()) == {60 * (1 + number)}


def test_a_low_detail_is_one_tile():
    assert len(prepare_tiles(picture(1080, 1920), SETTINGS)) == 9
    (only,) = prepare_tiles(picture(1080, 1920), SETTINGS, max_pixels=262144)
    assert only.image.num_tokens <= 256
    assert only.label == ""


def test_equal_pixels_are_one_tile_and_others_another():
    first, second = (prepare_tiles(picture(1080, 1920, seed), SETTINGS) for seed in (1, 2))
    again = prepare_tiles(encoded(picture(1080, 1920, 1)), SETTINGS)
    assert [each.image.identity for each in again] == [each.image.identity for each in first]
    assert not {each.image.identity for each in first} & {each.image.identity for each in second}


def test_hostile_files_are_refused():
    for file in (b"", b"GIF89a", encoded(picture(64, 64))[:100]):
        with pytest.raises(InvalidPromptError):
            prepare_tiles(file, SETTINGS)


def test_settings_are_read(tmp_path):
    def read(**own):
        kind = {"image_processor_type": "Lfm2VlImageProcessorFast"}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(kind | own))
        return read_image_settings(tmp_path)

    assert read() == SETTINGS
    assert read(do_image_splitting=False).tiling is None
    assert read(max_tiles=4, use_thumbnail=False).tiling == ImageTiling(most=4, has_thumbnail=False)
    assert read(max_image_tokens=128).max_tokens == 256, "a tile has more"
    for own, words in (
        ({"resample": 3}, "resample=3"),
        ({"do_normalize": False}, "do_normalize=False"),
        ({"tile_size": 500}, "tile_size=500"),
        ({"min_tiles": 11}, "min_tiles=11"),
        ({"encoder_patch_size": 0}, "encoder_patch_size=0"),
        ({"max_pixels_tolerance": "2"}, "max_pixels_tolerance='2'"),
        ({"max_tiles": 10**6}, "most=1000000"),
    ):
        with pytest.raises((UnsupportedModelError, ConfigError), match=words):
            read(**own)
