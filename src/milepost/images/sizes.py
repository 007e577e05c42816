"""Sizes of resized pictures, and their numbers of tokens. Pure Python."""

from __future__ import annotations

import math

from milepost.errors import InvalidPromptError

MAX_RATIO = 200
"""Largest ratio of a picture's sides."""


def resized(
    height: int,
    width: int,
    unit: int,
    min_pixels: int,
    max_pixels: int,
    *,
    num_frames: int = 1,
    frames_each: int = 1,
    has_least_side: bool = False,
) -> tuple[int, int]:
    """Returns the height and width that a picture is resized to, both multiples of `unit`: the
    nearest ones, if their area is from `min_pixels` to `max_pixels`, or else the picture's size
    scaled to that area. Halves are rounded to even multiples. The area is that of all `num_frames`
    of a video, rounded to a multiple of the `frames_each` of a patch. With `has_least_side` no side
    is rounded to nothing before the area is taken.

    Raises InvalidPromptError for a picture that is more than `MAX_RATIO` times as long as wide.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidPromptError(
            f"the image has {width} x {height} pixels: one side may be at most {MAX_RATIO} times "
            "as long as the other; crop it or cut it into pieces"
        )
    rows, columns = round(height / unit), round(width / unit)
    if has_least_side:
        rows, columns = max(rows, 1), max(columns, 1)
    area = round(num_frames / frames_each) * frames_each * rows * columns * unit**2
    if area > max_pixels:
        factor = math.sqrt((num_frames * height * width) / max_pixels)
        rows = max(1, math.floor(height / factor / unit))
        columns = max(1, math.floor(width / factor / unit))
    elif area < min_pixels:
        factor = math.sqrt(min_pixels / (num_frames * height * width))
        rows = math.ceil(height * factor / unit)
        columns = math.ceil(width * factor / unit)
    return rows * unit, columns * unit


def num_tokens_of(grid: tuple[int, int, int], merge_size: int) -> int:
    """Returns the number of tokens of a picture with this grid of patches (times, rows,
    columns)."""
    times, rows, columns = grid
    return times * (rows // merge_size) * (columns // merge_size)
