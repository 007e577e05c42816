"""The Triton kernels of vision towers against the reference, in Triton's interpreter."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from milepost.kernels import vision
from milepost.kernels.vision import PictureFrames, attention, triton
from milepost.kernels.vision.attention import VisionTiles
from tests.numbers import relative_error

SMALL = VisionTiles(queries=32, keys=16, num_warps=4, num_stages=2)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("held", [1, 2])
def test_normalise(held: int) -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (5, 3 * held * 16), generator=random, dtype=torch.uint8)
    arguments = rows, randn(3, 256), 2, 16
    assert torch.equal(triton.normalise(*arguments), vision.normalise(*arguments))


@pytest.mark.parametrize("size", [(1, 6), (4, 6), (12, 2)])
def test_add_positions(size: tuple[int, int]) -> None:
    index = torch.arange(size[0] * size[1])
    places = index // size[1], index % size[1]
    arguments = randn(len(index), 20), randn(25, 20), places, size
    made, wanted = triton.add_positions(*arguments), vision.add_positions(*arguments)
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("width", [5, 48, 300])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_norm(has_delta: bool, width: int) -> None:
    hidden, delta = 3 + randn(7, width), randn(9, width)[:7] if has_delta else None
    arguments = hidden, delta, randn(width), randn(1, width)[0], 1e-6
    for made, wanted in zip(triton.add_norm(*arguments), vision.add_norm(*arguments), strict=True):
        torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 72, 80, 96])
@pytest.mark.parametrize("lengths", [(1,), (16, 16), (37,), (33, 1, 70)])
def test_attend(lengths: tuple[int, ...], head_dim: int) -> None:
    num_patches, num_heads, frames = sum(lengths), 2, frames_of(lengths)
    projected = randn(num_patches, 3 * num_heads * head_dim)
    angles = randn(num_patches, head_dim // 2).cos(), randn(num_patches, head_dim // 2).sin()
    wanted = vision.attend(projected.clone(), angles, num_heads, frames)
    given = projected.clone()
    made = attention.attend(projected, angles, num_heads, frames, SMALL)
    assert relative_error(made, wanted) < 1e-5
    first = lengths[0]
    alone = attention.attend(
        given[:first].clone(),
        (angles[0][:first], angles[1][:first]),
        num_heads,
        frames_of(lengths[:1]),
        SMALL,
    )
    assert torch.equal(made[:first], alone), "whatever stands beside a frame"


def frames_of(lengths: tuple[int, ...]) -> PictureFrames:
    """Frames of one picture if they are equally long, or else of several."""
    if len(set(lengths)) == 1:
        return PictureFrames(starts=None, lengths=lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PictureFrames(starts=starts, lengths=lengths)
