"""Rotary positions against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from milepost.pictures import Picture, overlapping, position_shift
from milepost.runner.positions import turned
from milepost.scheduler.plans import SequencePlan

IMAGE = 7


class Reference(Qwen3_5Model):
    """The class without weights, which its positions do not depend on."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = Qwen3_5Config()


REFERENCE = Reference()


def pictures_of(parts: list[int | tuple[int, int]]) -> tuple[list[Picture], int]:
    """The pictures (rows and columns in tokens) between texts (numbers of tokens), and how long the
    prompt is."""
    pictures, length = [], 0
    for part in parts:
        if isinstance(part, int):
            length += part
            continue
        rows, columns = part
        own = Picture(
            identity=bytes(16),
            offset=length,
            num_tokens=rows * columns,
            grid=(1, 2 * rows, 2 * columns),
            num_positions=max(rows, columns),
        )
        pictures.append(own)
        length = own.end
    return pictures, length


def expected(pictures: list[Picture], length: int, *, are_frames: bool = False) -> np.ndarray:
    kinds = torch.zeros(1, length, dtype=torch.int)
    for each in pictures:
        kinds[0, each.offset : each.end] = 1 + are_frames
    grids = torch.tensor([each.grid for each in pictures]) if pictures else None
    if are_frames:  # frames of one video are one grid
        grids = grids[:1] * torch.tensor([[len(pictures), 1, 1]])
    own = {"video_grid_thw" if are_frames else "image_grid_thw": grids}
    positions, _ = REFERENCE.get_rope_index(torch.zeros(1, length, dtype=torch.long), kinds, **own)
    return positions[:, 0].numpy()


def plan(pictures: list[Picture], start: int, end: int) -> SequencePlan:
    return SequencePlan(
        number=1,
        start=start,
        num_tokens=end - start,
        tokens=bytes(4 * (end - start)),
        new_pages=(),
        write_from=start,
        slot_in=1,
        slot_out=1,
        samples=True,
        pictures=tuple(overlapping(pictures, start, end)),
        shift=position_shift(pictures, start),
    )


def ours(pictures: list[Picture], start: int, end: int) -> np.ndarray:
    positions, parts = turned(plan(pictures, start, end), 2)
    every = np.stack([positions] * 3)
    for part in parts:
        every[1, part.tokens], every[2, part.tokens] = part.rows, part.columns
    return every


PROMPTS: list[list[int | tuple[int, int]]] = [
    [9],
    [5, (4, 6), 7],
    [5, (6, 4), 7],
    [(3, 3), 1, (1, 8), 2, (8, 1)],
    [4, (2, 2)],
    [1, (1, 1), 1, (1, 1), 5],
]


@pytest.mark.parametrize("parts", PROMPTS, ids=str)
def test_positions_equal_those_of_transformers(parts: list[int | tuple[int, int]]) -> None:
    pictures, length = pictures_of(parts)
    assert np.array_equal(ours(pictures, 0, length), expected(pictures, length))


def test_positions_of_a_videos_frames_equal_those_of_transformers() -> None:
    pictures, length = pictures_of([6, (2, 3), 5, (2, 3), 4, (2, 3), 3])
    assert np.array_equal(ours(pictures, 0, length), expected(pictures, length, are_frames=True))


sizes = st.tuples(st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 6), sizes), max_size=4), st.integers(0, 5), st.data())
def test_chunks_cut_anywhere_have_the_positions_of_the_whole(
    groups: list[tuple[int, tuple[int, int]]], rest: int, data: st.DataObject
) -> None:
    pictures, length = pictures_of([*(part for group in groups for part in group), rest + 1])
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    assert np.array_equal(ours(pictures, start, end), ours(pictures, 0, length)[:, start:end])
    assert np.array_equal(ours(pictures, 0, length), expected(pictures, length))


def test_parts_say_which_of_a_pictures_tokens_are_computed() -> None:
    pictures, _ = pictures_of([5, (4, 6), 7, (2, 2)])
    _, (first, second) = turned(plan(pictures, 8, 38), 2, 100)
    assert (first.first, len(first.tokens)) == (3, 21)
    assert (second.first, len(second.tokens)) == (0, 2)
    assert first.tokens.tolist() == list(range(100, 121))
    assert second.tokens.tolist() == [128, 129]


def test_positions_without_a_grid_are_indices() -> None:
    """Of models whose pictures take as many positions as tokens."""
    own = Picture(identity=bytes(16), offset=2, num_tokens=6, grid=(1, 4, 6), num_positions=6)
    positions, (part,) = turned(plan([own], 0, 12), None)
    assert positions.tolist() == list(range(12))
    assert part.rows.tolist() == part.columns.tolist() == [2, 3, 4, 5, 6, 7]
