"""Rows of patches against those of transformers' processor that uses Pillow."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from milepost.errors import InvalidPromptError
from milepost.images import ImageSettings, PreparedImage, normalisation, prepare
from tests.images.pictures import FORMATS, encoded, picture

SETTINGS = ImageSettings()
SMALL = ImageSettings(min_pixels=4_096, max_pixels=65_536)
SIZES = [
    *((1, 1), (1, 200), (200, 1), (16, 16), (31, 33), (32, 32), (48, 80), (63, 64), (100, 700)),
    *((239, 241), (480, 640), (900, 130), (1080, 1920)),
]


def reference(image: Image.Image, settings: ImageSettings) -> tuple[np.ndarray, tuple[int, ...]]:
    processor = Qwen2VLImageProcessorPil(
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        temporal_patch_size=settings.temporal_patch_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
        rescale_factor=settings.rescale_factor,
    )
    made = processor(images=[image], return_tensors="np")
    return made["pixel_values"], tuple(made["image_grid_thw"][0].tolist())


def normalised(prepared: PreparedImage, settings: ImageSettings) -> np.ndarray:
    """What the device makes of the rows: each byte's value in the table, each frame twice."""
    own = prepared.rows.reshape(len(prepared.rows), 3, 1, -1)
    own = np.repeat(own, settings.temporal_patch_size, 2)
    values = normalisation(settings)[np.arange(3)[:, None, None], own]
    return values.reshape(len(own), -1)


def assert_equal(image: Image.Image, settings: ImageSettings) -> None:
    expected, grid = reference(image, settings)
    prepared = prepare(image, settings)
    assert prepared.grid == grid
    assert prepared.num_tokens == len(prepared.rows) // settings.merge_size**2
    assert np.array_equal(normalised(prepared, settings), expected)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_rows_equal_those_of_the_reference_for_any_size(height: int, width: int) -> None:
    assert_equal(picture(height, width), SETTINGS if max(height, width) > 1000 else SMALL)


@pytest.mark.parametrize(
    "settings",
    [
        ImageSettings(min_pixels=1024, max_pixels=1024),
        ImageSettings(mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28), max_pixels=70_000),
        ImageSettings(patch_size=14, min_pixels=3136, max_pixels=12_544),
        ImageSettings(patch_size=8, merge_size=4, rescale_factor=1 / 256, max_pixels=70_000),
    ],
)
def test_rows_equal_those_of_the_reference_for_any_settings(settings: ImageSettings) -> None:
    assert_equal(picture(111, 155), settings)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "I;16"])
def test_rows_equal_those_of_the_reference_for_any_mode(mode: str) -> None:
    image = picture(60, 70, mode="L" if mode == "I;16" else mode)
    assert_equal(image.convert("I").convert(mode) if mode == "I;16" else image, SMALL)


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_what_is_transparent_is_laid_on_white(mode: str) -> None:
    """As the reference does; its oldest versions drop transparency, so it is given the result."""
    image = picture(60, 70, mode=mode)
    if mode == "P":
        image.info["transparency"] = image.getpixel((3, 3))
    white = Image.new("RGBA", image.size, "white")
    flat = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    assert_equal(flat, SMALL)
    assert np.array_equal(prepare(image, SMALL).rows, prepare(flat, SMALL).rows)
    dropped = image.convert("RGB")
    dropped.info.clear()
    assert not np.array_equal(prepare(dropped, SMALL).rows, prepare(flat, SMALL).rows)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_is_prepared_as_its_picture_is(kind: str) -> None:
    data = encoded(picture(50, 90), kind)
    with Image.open(BytesIO(data)) as opened:
        expected, _ = reference(opened, SMALL)
    assert np.array_equal(normalised(prepare(data, SMALL), SMALL), expected)


@pytest.mark.parametrize("orientation", range(1, 10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_turned_upright(kind: str, orientation: int) -> None:
    image, exif = picture(40, 90), Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif)
    with Image.open(BytesIO(data)) as opened:
        expected, grid = reference(ImageOps.exif_transpose(opened), SMALL)
    prepared = prepare(data, SMALL)
    assert prepared.grid == grid
    assert np.array_equal(normalised(prepared, SMALL), expected)


def test_a_picture_whose_exif_is_damaged_is_taken_as_it_stands() -> None:
    data = encoded(picture(40, 90), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\xff")
    assert np.array_equal(prepare(data, SMALL).rows, prepare(picture(40, 90), SMALL).rows)


def test_identity_is_that_of_the_pixels_and_not_of_the_file() -> None:
    image = picture(50, 90)
    identity = prepare(image, SMALL).identity
    assert len(identity) == 16
    assert prepare(encoded(image), SMALL).identity == identity
    assert prepare(encoded(image, "PNG", compress_level=0), SMALL).identity == identity
    assert prepare(encoded(image, "WEBP", lossless=True), SMALL).identity == identity


def test_identity_differs_for_other_pixels_grids_and_settings() -> None:
    image = picture(64, 64)
    changed = image.copy()
    changed.putpixel((5, 5), (1, 2, 3))
    # Both have equal bytes in all rows, and differ in nothing but their grid.
    wide, tall = Image.new("RGB", (128, 64), 7), Image.new("RGB", (64, 128), 7)
    assert np.array_equal(prepare(wide, SMALL).rows, prepare(tall, SMALL).rows)
    other = ImageSettings(min_pixels=4_096, max_pixels=65_536, mean=(0.5, 0.5, 0.4))
    made = [prepare(each, SMALL).identity for each in (image, changed, wide, tall)]
    assert len({*made, prepare(image, other).identity}) == 5


def test_fewer_pixels_may_be_asked_for_than_the_checkpoint_allows() -> None:
    image = picture(480, 640)
    assert prepare(image, SETTINGS).num_tokens == 300
    low = prepare(image, SETTINGS, max_pixels=100 * 1024)
    assert low.num_tokens <= 100
    assert prepare(image, SETTINGS, max_pixels=2**30).num_tokens == 300
    assert low.identity == prepare(image, ImageSettings(max_pixels=100 * 1024)).identity


@pytest.mark.parametrize(("height", "width"), [(1, 201), (402, 2)])
def test_a_picture_that_is_too_long_is_refused_with_its_size(height: int, width: int) -> None:
    with pytest.raises(InvalidPromptError, match=f"{width} x {height} pixels: one side may be at"):
        prepare(picture(height, width), SMALL)
