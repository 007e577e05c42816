"""LFM2-VL, whose tower is SigLIP2 and whose images are tiles: embeddings and logits beside
transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.images import PreparedImage, normalisation
from milepost.models import Decoder, LoadOptions, load_model
from tests.numbers import relative_error
from tests.pictured import prompt, refuse_tower
from tests.runner.pictured import chunked_logits
from tests.tiled import SETTINGS, expected_logits, inputs, save, tile

SIZES = [(2, 3), (3, 2), (4, 4), (1, 4), (4, 1), (2, 7)]
"""Rows and columns in tokens."""


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, LoadOptions(has_tower=True, **options))[0]


def encode(model: Decoder, prepared: PreparedImage, **options: Any) -> Tensor:
    assert model.tower is not None
    table = torch.from_numpy(normalisation(SETTINGS)).to(model.dtype)
    return model.tower(torch.from_numpy(prepared.rows), table, [prepared.grid], **options)


@torch.no_grad()
def expected(reference: Any, images: list[PreparedImage]) -> list[Tensor]:
    return list(reference.model.get_image_features(**inputs(images)).pooler_output)


@pytest.mark.parametrize("has_norm", [True, False])
def test_embeddings_match_transformers(has_norm: bool, tmp_path: Path) -> None:
    images = [tile(*size, seed) for seed, size in enumerate(SIZES)]
    reference = save(tmp_path, projector_use_layernorm=has_norm)
    for each, own in zip(images, expected(reference, images), strict=True):
        assert len(own) == each.num_tokens == each.num_positions
        for is_fixed in (False, True):
            assert relative_error(encode(load(tmp_path), each, is_fixed=is_fixed), own) < 1e-5
        assert own.std() > 0.3, "flat embeddings would show nothing"


def test_checkpoints_whose_tensors_have_older_paths_are_read(tmp_path: Path) -> None:
    """Published ones have another module around the tower, and a head that is not run."""
    images = [tile(2, 3)]
    (wanted,) = expected(save(tmp_path), images)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for inner in ("vision_tower.vision_model.", "vision_tower."):
        renamed = {name.replace("vision_tower.", inner): value for name, value in tensors.items()}
        renamed[f"model.{inner}head.probe"] = torch.zeros(1, 1, 48)
        save_file(renamed, file)
        assert relative_error(encode(load(tmp_path), images[0]), wanted) < 1e-5


PROMPTS = {
    "one": prompt(20, tile(4, 4), 30),
    "several": prompt(7, tile(4, 3, 1), 3, tile(2, 4, 2), tile(1, 5, 3), 40),
    "first": prompt(tile(4, 4), 12),
    "last": prompt(30, tile(4, 3)),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_logits_match_transformers(kind: str, tmp_path: Path) -> None:
    given = PROMPTS[kind]
    wanted = expected_logits(save(tmp_path), given)
    own = chunked_logits(load(tmp_path), SETTINGS, given, [0, len(given.token_ids)])
    assert relative_error(own, wanted) < 1e-4
    assert wanted.std() > 0.5, "flat logits would show nothing"


def test_logits_in_chunks_that_cut_a_picture_match_transformers(tmp_path: Path) -> None:
    given = prompt(55, tile(4, 4, 1), 50, tile(4, 3, 2), 30)
    wanted = expected_logits(save(tmp_path), given)
    assert given.offsets[0] < 64 < given.offsets[0] + 16
    assert given.offsets[1] < 128 < given.offsets[1] + 12
    own = chunked_logits(load(tmp_path), SETTINGS, given, [0, 64, 128, len(given.token_ids)])
    assert relative_error(own, wanted) < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act='gelu'"),
        ({"vision_config": {"num_patches": 35}}, "vision_config.num_patches=35"),
        ({"vision_config": {"num_attention_heads": 24}}, "vision_config.num_attention_heads=24"),
        ({"downsample_factor": 0}, ": downsample_factor=0"),
        ({"projector_bias": False}, ": projector_bias=False"),
        ({"projector_hidden_act": "silu"}, ": projector_hidden_act='silu'"),
        ({"vision_feature_layer": -2}, ": vision_feature_layer=-2"),
    ],
)
def test_settings_that_are_not_run_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save(tmp_path)
    refuse_tower(tmp_path, changes, words)
