"""Rotary positions of a step's tokens, where prompts have pictures.

A token's rotary position is its index in the prompt, plus the shift of the pictures before it (zero
or negative). All tokens of a picture have its first position in time; their rows and columns are
counted from there (Qwen2-VL, arXiv:2409.12191, section 2.1).

Legend: T tokens, N tokens of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milepost.pictures import Picture

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePart:
    """The tokens of one picture that a step computes for one sequence."""

    identity: bytes
    first: int
    """Number of the picture's first token that is computed."""
    tokens: Numbers
    """[N], their indices among the sequence's tokens in the step."""
    rows: Numbers
    """[N], rotary positions of their rows."""
    columns: Numbers
    """[N], rotary positions of their columns."""


def rotary_positions(
    start: int, num_tokens: int, shift: int, pictures: Sequence[Picture], merge_size: int | None
) -> tuple[Numbers, list[PicturePart]]:
    """Returns the rotary positions [T] of the tokens [start, start + num_tokens) of a sequence, and
    the parts of `pictures`, in order, that they stand for. `shift` is that of the token at `start`,
    and `merge_size` the number of patches of a token's side, or None if a picture's tokens have one
    position each, like text."""
    end, parts = start + num_tokens, []
    positions = np.arange(start, end) + shift
    for picture in pictures:
        first, last = max(picture.offset, start), min(picture.end, end)
        if first >= last:
            continue
        tokens = np.arange(first, last)
        times, rows, columns = _places(tokens - picture.offset, picture, merge_size)
        begin = picture.offset + shift
        positions[first - start : last - start] = begin + times
        parts.append(
            PicturePart(
                identity=picture.identity,
                first=first - picture.offset,
                tokens=tokens - start,
                rows=begin + rows,
                columns=begin + columns,
            )
        )
        saved = picture.num_positions - picture.num_tokens
        positions[last - start :] += saved
        shift += saved
    return positions, parts


def _places(
    numbers: Numbers, picture: Picture, merge_size: int | None
) -> tuple[Numbers, Numbers, Numbers]:
    """Returns time, row and column of a picture's tokens."""
    if merge_size is None:
        return numbers, numbers, numbers
    _, rows, columns = picture.grid
    width = columns // merge_size
    time, within = np.divmod(numbers, rows // merge_size * width)
    row, column = np.divmod(within, width)
    return time, row, column
