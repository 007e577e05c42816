"""Cuts large pictures into tiles, as LFM2-VL reads them: a grid of squares, and a small copy of the
whole picture. Small pictures are one tile of their own shape.

A tile is a picture of its own to the tower and to the cache. In a prompt a label stands before
each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from milepost.images import decoding
from milepost.images.patches import PreparedImage, from_frames, lowered, normalised
from milepost.images.resampling import resize_bicubic, resize_bilinear
from milepost.images.settings import ImageSettings, ImageTiling
from milepost.images.sizes import resized, resized_in_patches

THUMBNAIL = "<|img_thumbnail|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A part of a picture, or all of it."""

    image: PreparedImage
    label: str
    """The text before it."""


def prepare_tiles(
    picture: bytes | Image.Image,
    settings: ImageSettings,
    *,
    max_pixels: int | None = None,
    max_decoded: int = decoding.MAX_PIXELS,
) -> list[Tile]:
    """Prepares a picture, as `patches.prepare` does. With `max_pixels` it is not cut. Raises
    InvalidPromptError."""
    pixels = np.asarray(decoding.open_picture(picture, max_decoded))
    if settings.keeps_overshoot:
        return [Tile(image=_unrounded(pixels, lowered(settings, max_pixels)), label="")]
    tiling = settings.tiling if max_pixels is None else None
    settings = lowered(settings, max_pixels)
    height, width, _ = pixels.shape
    whole = resized(height, width, *settings.limits, has_least_side=True)
    if tiling is None or not _is_large(height, width, settings, tiling):
        return [Tile(image=from_frames([resize_bilinear(pixels, whole)], settings), label="")]
    down, across = grid_of(height, width, tiling)
    large = resize_bilinear(pixels, (down * tiling.side, across * tiling.side))
    tiles = [
        Tile(image=from_frames([part], settings), label=f"<|img_row_{row}_col_{column}|>")
        for row, column, part in _parts(large, tiling.side)
    ]
    if tiling.has_thumbnail and len(tiles) > 1:
        small = from_frames([resize_bilinear(pixels, whole)], settings)
        tiles.append(Tile(image=small, label=THUMBNAIL))
    return tiles


def _unrounded(pixels: NDArray[np.uint8], settings: ImageSettings) -> PreparedImage:
    """Prepares a picture for a tower that reads floats."""
    side, (height, width, _) = settings.patch_size, pixels.shape
    limits = settings.min_pixels // side**2, settings.max_pixels // side**2
    size = resized_in_patches(height, width, side, settings.merge_size, limits)
    return from_frames([normalised(resize_bicubic(pixels, size), settings)], settings)


def _is_large(height: int, width: int, settings: ImageSettings, tiling: ImageTiling) -> bool:
    unit, least = settings.unit, settings.patch_size
    rounded = (max(least, round(side / unit) * unit) for side in (height, width))
    return tiling.most > 1 and prod(rounded) > settings.max_pixels * tiling.tolerance


def grid_of(height: int, width: int, tiling: ImageTiling) -> tuple[int, int]:
    """Returns how many tiles a picture has from top to bottom and from left to right: the grid
    whose shape is nearest to its own. Of equally near ones it is a larger one if the picture has
    more than half of its pixels."""
    counts = range(1, tiling.most + 1)
    grids = [(x, y) for x in counts for y in counts if tiling.least <= x * y <= tiling.most]
    best, least = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=prod):
        off = abs(width / height - columns / rows)
        is_filled = height * width > 0.5 * tiling.side**2 * columns * rows
        if off < least or (off == least and is_filled):
            best, least = (columns, rows), off
    return best[1], best[0]


def _parts(pixels: NDArray[np.uint8], side: int) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Yields the squares of a picture, with their row and column counted from 1."""
    for row in range(0, len(pixels), side):
        for column in range(0, pixels.shape[1], side):
            part = pixels[row : row + side, column : column + side]
            yield row // side + 1, column // side + 1, part
