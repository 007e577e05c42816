"""Logits of prompts with pictures against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from milepost.images.patches import from_frames
from milepost.models import Decoder, LoadOptions, load_model
from milepost.runner.pictures import EncodedPictures, PicturePixels, rows_of
from milepost.runner.positions import turned
from milepost.scheduler.plans import StepPlan
from tests.batches import Part, build_pools
from tests.images.pictures import pixels
from tests.numbers import relative_error
from tests.pictured import (
    IMAGE,
    SETTINGS,
    VIDEO,
    Pictured,
    expected_logits,
    grids,
    image,
    pixel_values,
    prompt,
    save,
)
from tests.runner.pictured import part

PAGES = [3, 1, 5, 2]
PROMPTS = {
    "one": prompt(20, image(4, 6), 30),
    "several": prompt(7, image(4, 6, 1), 3, image(6, 4, 2), image(1, 5, 3), 40),
    "first": prompt(image(8, 8), 12),
    "last": prompt(30, image(5, 3)),
}


def encode(model: Decoder, given: Pictured) -> EncodedPictures:
    pictures = EncodedPictures.of(model, SETTINGS)
    assert pictures is not None
    for each in given.images:
        pictures.take(each.identity, PicturePixels(rows=each.rows, grid=each.grid))
    pictures.follow(StepPlan(sequences=(), encodes=tuple(given.pictures)))
    return pictures


def logits(model: Decoder, given: Pictured, edges: Sequence[int]) -> Tensor:
    """The logits of all tokens of a sequence in slot 1, in chunks."""
    pools, encoded, made = build_pools(model), encode(model, given), []
    for begin, end in pairwise(edges):
        own = part(given, begin, end, 1)
        positions, _ = turned(own, SETTINGS.merge_size)
        slot = 1 if begin else 0
        chunk = Part(pages=PAGES, start=begin, length=end - begin, slot_in=slot, slot_out=1)
        ctx = pools.context([chunk], num_decodes=int(end - begin == 1 and begin > 0))
        ctx = replace(
            ctx,
            step=replace(ctx.step, positions=torch.from_numpy(positions).int()),
            pictures=rows_of(encoded, StepPlan(sequences=(own,)), SETTINGS.merge_size),
        )
        made.append(model.compute_logits(model(given.token_ids[begin:end], ctx)))
    return torch.cat(made)


def load(folder: Path) -> Decoder:
    return load_model(folder, LoadOptions(has_tower=True))[0]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("kind", PROMPTS)
def test_logits_match_transformers(kind: str, name: str, tmp_path: Path) -> None:
    given = PROMPTS[kind]
    expected = expected_logits(save(name, tmp_path), given)
    own = logits(load(tmp_path), given, [0, len(given.token_ids)])
    assert relative_error(own, expected) < 1e-4
    assert expected.std() > 0.5, "flat logits would show nothing"


def test_logits_in_chunks_that_cut_a_picture_match_transformers(tmp_path: Path) -> None:
    given = prompt(50, image(5, 7, 1), 20, image(6, 4, 2), 30)
    expected = expected_logits(save("qwen3_5", tmp_path), given)
    model, length = load(tmp_path), len(given.token_ids)
    assert given.offsets == [51, 108]
    for edges in ([0, 64, 110, length], [0, 51, 86, 128, length - 2, length - 1, length]):
        assert relative_error(logits(model, given, edges), expected) < 1e-4


@torch.no_grad()
def test_frames_of_a_video_match_transformers(tmp_path: Path) -> None:
    """An image, and two groups of frames with texts before them, which transformers takes as one
    grid."""
    pairs = (1, 2), (3, 4)
    groups = [from_frames([pixels(24, 32, seed) for seed in pair], SETTINGS) for pair in pairs]
    still = image(4, 2, 9)
    given = prompt(9, still, 7, groups[0], 5, groups[1], 30)
    ids, types = given.token_ids.clone(), (given.token_ids == IMAGE).int()
    for each in given.pictures[1:]:
        ids[each.offset : each.end] = VIDEO
        types[each.offset : each.end] = 2
    reference = save("qwen3_5", tmp_path)
    expected = reference(
        input_ids=ids[None],
        mm_token_type_ids=types[None],
        pixel_values=pixel_values([still]),
        image_grid_thw=grids([still]),
        pixel_values_videos=pixel_values(groups),
        video_grid_thw=torch.tensor([[2, *groups[0].grid[1:]]]),
        use_cache=False,
    ).logits[0]
    own = logits(load(tmp_path), replace(given, token_ids=ids), [0, 40, len(ids)])
    assert relative_error(own, expected) < 1e-4


def test_another_picture_or_another_shape_changes_the_logits(tmp_path: Path) -> None:
    """Positions count: 24 tokens as 4 x 6 or 6 x 4 shift all that follows differently."""
    save("qwen3_5", tmp_path)
    model = load(tmp_path)
    wide, tall, other = (prompt(9, each, 9) for each in (image(4, 6), image(6, 4), image(4, 6, 5)))
    assert len(wide.token_ids) == len(tall.token_ids)
    edges = [0, len(wide.token_ids)]
    first = logits(model, wide, edges)
    for another in (tall, other):
        assert relative_error(logits(model, another, edges)[-5:], first[-5:]) > 0.05
        assert torch.equal(logits(model, another, edges)[:9], first[:9])


def test_text_is_computed_as_without_a_tower_bit_for_bit(tmp_path: Path) -> None:
    given = prompt(90)
    expected = expected_logits(save("qwen3_5", tmp_path), given)
    plain, whole = load_model(tmp_path)[0], load(tmp_path)
    own = logits(whole, given, [0, 64, 90])
    assert torch.equal(own, logits_of_text(plain, given.token_ids, [0, 64, 90]))
    assert relative_error(own, expected) < 1e-4


def logits_of_text(model: Decoder, token_ids: Tensor, edges: Sequence[int]) -> Tensor:
    pools, made = build_pools(model), []
    for begin, end in pairwise(edges):
        slot = 1 if begin else 0
        part = Part(pages=PAGES, start=begin, length=end - begin, slot_in=slot, slot_out=1)
        made.append(model.compute_logits(model(token_ids[begin:end], pools.context([part]))))
    return torch.cat(made)
