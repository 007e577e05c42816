"""Vision towers against transformers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import UnsupportedModelError, WeightsError
from milepost.images import PreparedImage, normalisation
from milepost.models import Decoder, LoadOptions, load_model
from tests import checkpoints
from tests.numbers import relative_error
from tests.pictured import SETTINGS, build, grids, image, pixel_values, save

SIZES = [(2, 3), (3, 2), (1, 8), (5, 5), (8, 1), (1, 1), (7, 9)]
"""Rows and columns in tokens."""


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, LoadOptions(has_tower=True, **options))[0]


def encode(model: Decoder, prepared: PreparedImage) -> Tensor:
    assert model.tower is not None
    table = torch.from_numpy(normalisation(SETTINGS)).to(model.dtype)
    return model.tower(torch.from_numpy(prepared.rows), table, [prepared.grid])


@torch.no_grad()
def expected(reference: Any, images: list[PreparedImage]) -> list[Tensor]:
    values = pixel_values(images)
    return list(reference.model.get_image_features(values, grids(images)).pooler_output)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_embeddings_match_transformers(name: str, tmp_path: Path) -> None:
    images = [image(*size, seed) for seed, size in enumerate(SIZES)]
    wanted = expected(save(name, tmp_path), images)
    model = load(tmp_path)
    for each, own in zip(images, wanted, strict=True):
        assert len(own) == each.num_tokens
        assert relative_error(encode(model, each), own) < 1e-5
        assert own.std() > 0.3, "flat embeddings would show nothing"


def test_frames_of_a_video_attend_to_themselves_alone(tmp_path: Path) -> None:
    """Two frame pairs in one grid equal two grids of one."""
    save("qwen3_5", tmp_path)
    model, pair = load(tmp_path), [image(2, 3, 0), image(2, 3, 1)]
    rows = torch.cat([torch.from_numpy(each.rows) for each in pair])
    table = torch.from_numpy(normalisation(SETTINGS))
    assert model.tower is not None
    both = model.tower(rows, table, [(2, *pair[0].grid[1:])])
    one_by_one = torch.cat([encode(model, each) for each in pair])
    assert relative_error(both, one_by_one) < 1e-6


def test_pictures_that_are_encoded_together_have_the_bits_of_each_alone(tmp_path: Path) -> None:
    """In any order and beside any others, videos' frames among them; and all match transformers."""
    images = [image(*size, seed) for seed, size in enumerate(SIZES)]
    wanted = expected(save("qwen3_5", tmp_path), images)
    tower, table = load(tmp_path).tower, torch.from_numpy(normalisation(SETTINGS))
    assert tower is not None

    def encoded(chosen: list[int]) -> list[Tensor]:
        rows = torch.cat([torch.from_numpy(images[each].rows) for each in chosen])
        made = tower(rows, table, [images[each].grid for each in chosen], is_fixed=True)
        return list(made.split([images[each].num_tokens for each in chosen]))

    alone = [encoded([each])[0] for each in range(len(images))]
    for chosen in ([0, 1, 2, 3, 4, 5, 6], [6, 4, 2, 0], [5, 3], [1, 1]):
        for each, own in zip(chosen, encoded(chosen), strict=True):
            assert torch.equal(own, alone[each])
            assert relative_error(own, wanted[each]) < 1e-5


@pytest.mark.parametrize("edges", [[0, 1, 2, 3], [0, 2, 3], [0, 0, 3]])
def test_a_picture_that_is_encoded_over_several_steps_has_the_same_bits(
    edges: list[int], tmp_path: Path
) -> None:
    save("qwen3_5", tmp_path)
    model, prepared = load(tmp_path), image(5, 4)
    table = torch.from_numpy(normalisation(SETTINGS))
    assert model.tower is not None
    layout = model.tower.lay_out([prepared.grid])
    run = model.tower.begin(torch.from_numpy(prepared.rows), table, layout)
    for first, end in pairwise(edges):
        model.tower.advance(run, first, end)
    assert torch.equal(model.tower.end(run), encode(model, prepared))


def test_a_still_picture_is_two_equal_frames(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    model, still = load(tmp_path), image(2, 3)
    rows = torch.from_numpy(still.rows).view(len(still.rows), 3, 1, -1)
    table = torch.from_numpy(normalisation(SETTINGS))
    assert model.tower is not None
    doubled = model.tower(rows.expand(-1, -1, 2, -1).flatten(1), table, [still.grid])
    assert torch.equal(doubled, encode(model, still))


def test_the_tower_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    model, whole = load_model(tmp_path)[0], load(tmp_path)
    assert model.tower is None
    assert whole.tower is not None
    own = sum(parameter.nbytes for parameter in whole.tower.parameters())
    assert whole.num_bytes - model.num_bytes == own > 0
    assert model.layers.state_dict().keys() == whole.layers.state_dict().keys()


def test_a_text_model_has_no_tower(tmp_path: Path) -> None:
    checkpoints.save("qwen3_5", tmp_path)
    assert load(tmp_path).tower is None


def test_a_tensor_of_the_tower_that_is_missing_or_not_placed_is_named(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop("model.visual.blocks.1.attn.proj.bias")
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"visual\.blocks\.1\.attn\.proj\.bias' is missing"):
        load(tmp_path)
    tensors["model.visual.blocks.1.attn.proj.bias"] = bias
    save_file(tensors | {"model.visual.blocks.1.attn.proj.weight_scale": bias[:1].clone()}, file)
    with pytest.raises(WeightsError, match=r"visual\.blocks\.1\.attn\.proj\.weight_scale"):
        load(tmp_path)
    load_model(tmp_path)


def test_dummy_weights_encode_pictures(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    model = load(tmp_path, load_format="dummy", dtype="bfloat16")
    embedded = encode(model, image(3, 4))
    assert embedded.shape == (12, 48)
    assert embedded.isfinite().all()
    assert embedded.float().std() > 0


def test_checkpoints_without_rotary_settings_of_the_tower_are_read(tmp_path: Path) -> None:
    """Published ones name none; older ones also call the tower as the whole model."""
    images = [image(3, 4)]
    wanted = expected(save("qwen3_5", tmp_path), images)
    _change(tmp_path, rope_parameters=None, model_type="qwen3_5")
    assert relative_error(encode(load(tmp_path), images[0]), wanted[0]) < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes=\[1\]"),
        ({"in_channels": 1}, "in_channels=1"),
        ({"num_heads": 24}, "num_heads=24"),
        ({"num_position_embeddings": 35}, "num_position_embeddings=35"),
        ({"out_hidden_size": 40}, "out_hidden_size=40"),
        ({"patch_size": [4, 8]}, r"patch_size=\[4, 8\]"),
        ({"depth": 0}, "depth=0"),
        ({"spatial_merge_size": 2**30}, "spatial_merge_size=1073741824"),
    ],
)
def test_settings_that_are_not_run_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save("qwen3_5", tmp_path)
    _change(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"config\.{words}.*language_model_only"):
        load(tmp_path)
    load_model(tmp_path)


def test_positions_without_sections_are_refused(tmp_path: Path) -> None:
    model = build("qwen3_5")
    del model.config.text_config.rope_parameters["mrope_section"]
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="mrope_section=None"):
        load(tmp_path)


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= changes
    path.write_text(json.dumps(config))
