"""Rotary positions of a step's tokens, where prompts have pictures.

A token's rotary position is its index in the prompt, plus the shift of the pictures before it (zero
or negative). All tokens of a picture have its first position in time; their rows and columns are
counted from there (Qwen2-VL, arXiv:2409.12191, section 2.1).

Legend: T tokens, S sequences, N tokens of a picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.layout.batch import Ints
from milepost.pictures import Picture
from milepost.scheduler.plans import SequencePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePart:
    """The tokens of one picture that a step computes for one sequence."""

    identity: bytes
    first: int
    """Number of the picture's first token that is computed."""
    tokens: Ints
    """[N], their indices among the step's tokens."""
    rows: Ints
    """[N], rotary positions of their rows."""
    columns: Ints
    """[N], rotary positions of their columns."""


def shifted(
    sequences: Sequence[SequencePlan],
    positions: Ints,
    shifts: Ints,
    owners: Ints,
    merge_size: int | None,
) -> Ints:
    """Returns the rotary positions of tokens with the indices `positions` [T], of sequences
    `owners` [T], whose `shifts` [S] are those at their first tokens. Steps without pictures in
    their prompts get `positions` itself."""
    if not any(sequence.pictures for sequence in sequences):
        return positions + shifts[owners] if shifts.any() else positions
    return np.concatenate([turned(each, merge_size)[0] for each in sequences])


def parts(sequences: Sequence[SequencePlan], merge_size: int | None) -> Iterator[PicturePart]:
    """Yields the parts of pictures that a step's tokens stand for, in order."""
    first = 0
    for sequence in sequences:
        if sequence.pictures:
            yield from turned(sequence, merge_size, first)[1]
        first += sequence.num_tokens


def turned(
    sequence: SequencePlan, merge_size: int | None, index: int = 0
) -> tuple[Ints, list[PicturePart]]:
    """Returns the rotary positions [T] of a sequence's tokens, and the parts of pictures that they
    stand for.

    `index` is that of its first token in the step. `merge_size` is the number of patches of a
    token's side, or None if a picture's tokens have one position each, like text.
    """
    start, end, shift = sequence.start, sequence.end, sequence.shift
    positions, found = np.arange(start, end) + shift, []
    for picture in sequence.pictures:
        first, last = max(picture.offset, start), min(picture.end, end)
        tokens = np.arange(first, last)
        times, rows, columns = _places(tokens - picture.offset, picture, merge_size)
        begin = picture.offset + shift
        positions[first - start : last - start] = begin + times
        part = PicturePart(
            identity=picture.identity,
            first=first - picture.offset,
            tokens=tokens - start + index,
            rows=begin + rows,
            columns=begin + columns,
        )
        found.append(part)
        saved = picture.num_positions - picture.num_tokens
        positions[last - start :] += saved
        shift += saved
    return positions, found


def _places(
    numbers: NDArray[np.int64], picture: Picture, merge_size: int | None
) -> tuple[Ints, Ints, Ints]:
    """Returns time, row and column of a picture's tokens."""
    if merge_size is None:
        return numbers, numbers, numbers
    _, rows, columns = picture.grid
    width = columns // merge_size
    time, within = np.divmod(numbers, rows // merge_size * width)
    row, column = np.divmod(within, width)
    return time, row, column
