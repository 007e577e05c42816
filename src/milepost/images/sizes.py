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
    _check_ratio(height, width)
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


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidPromptError(
            f"the image has {width} x {height} pixels: one side may be at most {MAX_RATIO} times "
            "as long as the other; crop it or cut it into pieces"
        )


def resized_in_patches(
    height: int, width: int, side: int, merge: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """Returns the height and width that Nemotron's processor resizes a picture to: multiples of
    `merge` patches of `side` pixels, by whole patches that cover the picture. `limits` are the
    fewest patches and the most, which is never passed; where these are equal, fewer remain. Raises
    InvalidPromptError as `resized` does."""
    _check_ratio(height, width)
    least, most = limits
    rows, columns = round(height / side + 0.5), round(width / side + 0.5)
    factor = min(math.sqrt(most / (rows * columns)), 1.0)
    rows, columns = (max(1, math.floor(factor * each)) for each in (rows, columns))
    if least < most and rows * columns < least:
        factor = math.sqrt(least / (rows * columns))
        rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
    rows = _whole_tokens(rows, columns, merge, most)
    columns = _whole_tokens(columns, rows, merge, most)
    while rows * columns > most and max(rows, columns) > merge:  # the limits are nearly equal
        rows, columns = (rows - merge, columns) if rows > columns else (rows, columns - merge)
    return rows * side, columns * side


def resized_frame(height: int, width: int, side: int, merge: int, most: int) -> tuple[int, int]:
    """Returns the height and width that Nemotron's processor resizes a video's frames to: of nearly
    `most` patches of `side` pixels, in multiples of `merge`. Raises InvalidPromptError as `resized`
    does."""
    _check_ratio(height, width)
    ratio = width / height
    nearest = (max(round(math.sqrt(area)), 1) for area in (most / ratio, most * ratio))
    rows, columns = nearest
    above = [math.ceil(each / merge) * merge for each in (rows, columns)]
    if above[0] * above[1] > most:
        above = [max(merge, each // merge * merge) for each in (rows, columns)]
    return above[0] * side, above[1] * side


def _whole_tokens(count: int, others: int, merge: int, most: int) -> int:
    """Returns a multiple of `merge`: the next one, if there are at most `most` patches then."""
    above = math.ceil(count / merge) * merge
    return above if above * others <= most else max(merge, count // merge * merge)


def num_tokens_of(grid: tuple[int, int, int], merge_size: int) -> int:
    """Returns the number of tokens of a picture with this grid of patches (times, rows,
    columns)."""
    times, rows, columns = grid
    return times * (rows // merge_size) * (columns // merge_size)
