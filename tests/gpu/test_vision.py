"""Vision towers on a GPU at real shapes, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from milepost.images import ImageSettings, PreparedImage, normalisation, prepare
from milepost.images.settings import ImageTiling
from milepost.images.tiles import prepare_tiles
from milepost.kernels import vision
from milepost.layers.parameters import ModuleScope
from milepost.layers.tower import Tower
from milepost.layers.tower_parts import TowerNames, TowerShapes
from milepost.models import Decoder, LoadOptions, load_model
from milepost.pictures import Picture
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import largest_step
from milepost.runner.measuring import measure_tower
from milepost.runner.pictures import EncodedPictures, PicturePixels
from milepost.runner.pools import Pools
from milepost.runner.runner import Executor
from milepost.scheduler.plans import StepPlan
from tests import tiled
from tests.images.pictures import picture
from tests.numbers import relative_error
from tests.pictured import SETTINGS, image, prompt, save
from tests.runner.pictured import give, open_runner, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HEADS = {"small": (12, 64), "large": (16, 72)}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=random, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("lengths", [(256,), (1200,), (3001,), (300, 300, 300), (1200, 64, 777)])
def test_attend(lengths: tuple[int, ...], size: str, dtype: torch.dtype) -> None:
    num_heads, head_dim = HEADS[size]
    num_patches = sum(lengths)
    starts = None  # of one picture
    if len(set(lengths)) > 1:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    frames = vision.PictureFrames(starts=starts, lengths=lengths)
    projected = randn(num_patches, 3 * num_heads * head_dim, dtype=dtype)
    turns = randn(num_patches, head_dim // 2)
    angles = turns.cos(), turns.sin()
    wide = angles[0].double(), angles[1].double()
    expected = vision.attend(projected.double(), wide, num_heads, frames)
    attended = vision.attend(projected, angles, num_heads, frames)
    assert relative_error(attended, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [768, 1152])
def test_what_stands_around_attention(width: int, dtype: torch.dtype) -> None:
    hidden, delta = randn(700, width, dtype=dtype), randn(701, width, dtype=dtype)[:700]
    weight, bias = randn(width, dtype=dtype), randn(1, width, dtype=dtype)[0]
    given = hidden, delta, weight, bias
    expected = vision.add_norm(*(each.double() for each in given), 1e-6)
    for output, wanted in zip(vision.add_norm(*given, 1e-6), expected, strict=True):
        assert relative_error(output, wanted) < TOLERANCES[dtype]
    index = torch.arange(700, device="cuda")
    table, places = randn(2304, width, dtype=dtype), (index // 35, index % 35)
    added = vision.add_positions(hidden, table, places, (20, 35))
    wanted = vision.add_positions(hidden.double(), table.double(), places, (20, 35))
    assert relative_error(added, wanted) < TOLERANCES[dtype]
    up = randn(1000, width, dtype=dtype) * width**-0.5
    units = vision.multiply_gelu(hidden, up, randn(1000, dtype=dtype))
    wanted = vision.multiply_gelu(hidden.double(), up.double(), randn(1000, dtype=dtype).double())
    assert relative_error(units, wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("num_frames", [1, 2])
def test_normalise_is_a_table(num_frames: int) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    size = 500, 768 * num_frames
    rows = torch.randint(0, 256, size, generator=random, device="cuda", dtype=torch.uint8)
    given = rows, randn(3, 256), 2, 256
    wanted = vision.normalise(rows.cpu(), given[1].cpu(), 2, 256)
    assert torch.equal(vision.normalise(*given).cpu(), wanted)


def shapes_of(size: str) -> TowerShapes:
    num_heads, head_dim = HEADS[size]
    return TowerShapes(
        depth=3,
        hidden_size=num_heads * head_dim,
        num_heads=num_heads,
        feed_forward_size=4304,
        output_size=2048,
        patch_size=16,
        merge_size=2,
        num_frames=2,
        num_channels=3,
        num_positions=2304,
        theta=10_000.0,
    )


def tower(size: str, dtype: torch.dtype, device: str) -> Tower:
    return filled(Tower(shapes_of(size), ModuleScope(dtype=dtype, device=torch.device(device))))


def tiled_tower(size: str, dtype: torch.dtype, device: str) -> Tower:
    """LFM2-VL's, whose heads are not turned and whose positions are averaged."""
    shapes = replace(
        shapes_of(size),
        num_frames=1,
        num_positions=256,
        theta=None,
        merger_size=2560,
        table_fit="averaged",
    )
    names = TowerNames(merged_norm="merger.merged_norm")
    kind = ModuleScope(dtype=dtype, device=torch.device(device))
    return filled(Tower(shapes, kind, names))


def filled(made: Tower) -> Tower:
    random = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.empty(parameter.shape).uniform_(-0.06, 0.06, generator=random)
            parameter.copy_(values + (parameter.dim() == 1))
    return made


@pytest.mark.parametrize("size", HEADS)
def test_embeddings_are_close_to_the_reference(size: str) -> None:
    table = torch.from_numpy(normalisation(ImageSettings()))
    own, exact = tower(size, torch.bfloat16, "cuda"), tower(size, torch.float64, "cpu")
    prepared = prepare(picture(300, 420), ImageSettings())
    rows = torch.from_numpy(prepared.rows)
    expected = exact(rows, table.double(), [prepared.grid])
    found = own(rows.cuda(), table.cuda().bfloat16(), [prepared.grid])
    assert relative_error(found.cpu(), expected) < 2e-2


@pytest.mark.parametrize("size", HEADS)
def test_embeddings_of_tiles_are_close_to_the_reference(size: str) -> None:
    settings = replace(tiled.SETTINGS, patch_size=16, min_pixels=65536, max_pixels=262144)
    settings = replace(settings, tiling=ImageTiling())
    table = torch.from_numpy(normalisation(settings))
    own, exact = tiled_tower(size, torch.bfloat16, "cuda"), tiled_tower(size, torch.float64, "cpu")
    tiles = prepare_tiles(picture(600, 1000), settings)
    together = [each.image for each in tiles[-2:]]
    for image_ in together:
        rows = torch.from_numpy(image_.rows)
        expected = exact(rows, table.double(), [image_.grid])
        found = own(rows.cuda(), table.cuda().bfloat16(), [image_.grid])
        assert relative_error(found.cpu(), expected) < 2e-2
    alone = [
        own(torch.from_numpy(each.rows).cuda(), table.cuda().bfloat16(), [each.grid], is_fixed=True)
        for each in together
    ]
    rows = torch.cat([torch.from_numpy(each.rows) for each in together]).cuda()
    both = own(rows, table.cuda().bfloat16(), [each.grid for each in together], is_fixed=True)
    assert torch.equal(both, torch.cat(alone))


def test_an_embedding_is_the_same_bits_whatever_is_encoded_before_it() -> None:
    own = tower("large", torch.bfloat16, "cuda")
    table = torch.from_numpy(normalisation(ImageSettings())).cuda().bfloat16()
    sizes = [(300, 420), (64, 2000), (900, 900), (256, 256)]
    images = [prepare(picture(*each), ImageSettings()) for each in sizes]

    def encode(order: list[int]) -> dict[int, Tensor]:
        return {
            index: own(torch.from_numpy(images[index].rows).cuda(), table, [images[index].grid])
            for index in order
        }

    first, second = encode([0, 1, 2, 3]), encode([3, 1, 0, 2])
    assert all(torch.equal(first[index], second[index]) for index in first)


@pytest.mark.parametrize("size", HEADS)
def test_pictures_that_are_encoded_together_have_the_bits_of_each_alone(size: str) -> None:
    own = tower(size, torch.bfloat16, "cuda")
    table = torch.from_numpy(normalisation(ImageSettings())).cuda().bfloat16()
    sizes = [(256, 256), (480, 640), (64, 2000), (256, 256), (900, 900)]
    images = [prepare(picture(*each, seed), ImageSettings()) for seed, each in enumerate(sizes)]

    def encode(*chosen: int) -> list[Tensor]:
        rows = torch.cat([torch.from_numpy(images[each].rows) for each in chosen]).cuda()
        made = own(rows, table, [images[each].grid for each in chosen], is_fixed=True)
        return list(made.split([images[each].num_tokens for each in chosen]))

    alone = [encode(index)[0] for index in range(len(images))]
    for chosen in ((0, 1, 2, 3, 4), (4, 0), (3, 1, 2)):
        for index, found in zip(chosen, encode(*chosen), strict=True):
            assert torch.equal(found, alone[index])
    library = own(torch.from_numpy(images[1].rows).cuda(), table, [images[1].grid])
    assert relative_error(alone[1], library) < 2e-2


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("size", HEADS)
def test_graphs_have_the_bits_of_launches_and_the_memory_that_was_counted(
    size: str, joins: bool
) -> None:
    """Pictures of several sizes take turns, two of one size in a step, with other pixels each
    time."""
    own = tower(size, torch.bfloat16, "cuda")
    most = measure_tower(own, ImageSettings(), joins=joins, captures=True).tower_graphs
    plain, graphed = (EncodedPictures(own, ImageSettings(), joins=joins) for _ in range(2))
    graphed.capture(most)
    sizes = [(256, 256), (480, 640), (64, 2000), (1024, 1024), (300, 420), (1000, 500)]
    for turn in range(4):
        images = [prepare(picture(*each, turn), ImageSettings()) for each in sizes]
        first, rest = images[0], images[1:]
        for together in ([first, first], *([each] for each in rest)):
            expected, found = (encode(each, together) for each in (plain, graphed))
            assert torch.equal(found, expected)
    assert graphed._graphs.num_bytes <= most
    assert len(graphed._graphs._recent) >= len(sizes)


def encode(pictures: EncodedPictures, images: list[PreparedImage]) -> Tensor:
    """Encodes pictures in one step, and forgets them."""
    own = [
        Picture(
            offset=0,
            num_tokens=each.num_tokens,
            num_positions=each.num_tokens,
            identity=bytes([index]),
            grid=each.grid,
        )
        for index, each in enumerate(images)
    ]
    for each, image_ in zip(own, images, strict=True):
        pictures.take(each.identity, PicturePixels(rows=image_.rows, grid=image_.grid))
    pictures.follow(StepPlan(sequences=(), encodes=tuple(own)))
    made = torch.cat([pictures._embeddings[each.identity] for each in own])
    pictures.follow(StepPlan(sequences=(), drops=tuple(each.identity for each in own)))
    return made


def test_steps_with_pictures_are_close_to_those_of_the_reference(tmp_path: Path) -> None:
    """Chunks that cut a picture, on the fused kernels."""
    save("qwen3_5", tmp_path)
    given = prompt(50, image(5, 7, 1), 20, image(6, 4, 2), 30)
    edges = [0, 64, 110, 128, len(given.token_ids)]

    def fused(model: Decoder, pools: Pools) -> Executor:
        largest = largest_step(max_num_seqs=4, max_num_batched_tokens=256)
        sizes = {"num_requests": 4, "max_model_len": 256, "largest": largest}
        return DeviceExecutor(model, pools, **sizes, image_settings=SETTINGS)

    def load(device: str, dtype: torch.dtype) -> Decoder:
        return load_model(tmp_path, LoadOptions(has_tower=True, device=device, dtype=dtype))[0]

    own = open_runner(load("cuda", torch.float32), fused)
    exact = open_runner(load("cpu", torch.float32))
    for runner in (own, exact):
        give(runner, given)
    assert relative_error(run(own, given, edges).cpu(), run(exact, given, edges)) < 1e-3
