"""Nemotron's vision tower, C-RADIO: embeddings and logits beside transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import UnsupportedModelError
from milepost.images import PreparedImage, normalisation
from milepost.models import Decoder, LoadOptions, load_model
from tests.floating import SETTINGS, expected_logits, inputs, prepared, save
from tests.numbers import relative_error
from tests.pictured import prompt, refuse_tower
from tests.runner.pictured import chunked_logits

SIZES = [(16, 24), (31, 17), (40, 40), (8, 60), (7, 5), (50, 21)]
"""Height and width in pixels: grids within the table of positions, at its edge and beyond."""


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, LoadOptions(has_tower=True, **options))[0]


def encode(model: Decoder, *images: PreparedImage, is_fixed: bool = False) -> Tensor:
    assert model.tower is not None
    table = torch.from_numpy(normalisation(SETTINGS)).to(model.dtype)
    rows = torch.cat([torch.from_numpy(each.rows) for each in images])
    return model.tower(rows, table, [each.grid for each in images], is_fixed=is_fixed)


@torch.no_grad()
def expected(reference: Any, images: list[PreparedImage]) -> list[Tensor]:
    return list(reference.get_image_features(**inputs(images)).pooler_output)


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_embeddings_match_transformers(num_drafts: int, tmp_path: Path) -> None:
    images = [prepared(*size, seed) for seed, size in enumerate(SIZES)]
    reference = save(tmp_path, num_drafts=num_drafts)
    model = load(tmp_path)
    assert len({each.grid for each in images}) == len(SIZES)
    for each, own in zip(images, expected(reference, images), strict=True):
        assert len(own) == each.num_tokens == each.num_positions
        for is_fixed in (False, True):
            assert relative_error(encode(model, each, is_fixed=is_fixed), own) < 1e-5
        assert own.std() > 0.3, "flat embeddings would show nothing"


def test_a_picture_has_the_same_bits_beside_others(tmp_path: Path) -> None:
    images = [prepared(*size, seed) for seed, size in enumerate(SIZES)]
    save(tmp_path)
    model = load(tmp_path)
    together = encode(model, *images, is_fixed=True).split([each.num_tokens for each in images])
    for each, own in zip(images, together, strict=True):
        assert torch.equal(encode(model, each, is_fixed=True), own)


def test_published_and_converted_names_are_read(tmp_path: Path) -> None:
    image = prepared(16, 24)
    model = save(tmp_path)
    (wanted,) = expected(model, [image])
    file = tmp_path / "model.safetensors"
    names = set(load_file(file))
    assert "vision_model.radio_model.model.patch_generator.cls_token.token" in names
    assert "mlp1.3.weight" in names
    assert relative_error(encode(load(tmp_path), image), wanted) < 1e-5
    model.save_pretrained(tmp_path, save_original_format=False)
    names = set(load_file(file))
    assert "vision_model.embeddings.cls_register_token" in names
    assert "multi_modal_projector.linear_2.weight" in names
    assert relative_error(encode(load(tmp_path), image), wanted) < 1e-5


def test_a_norm_that_no_checkpoint_holds_is_plain(tmp_path: Path) -> None:
    image = prepared(16, 24)
    model = save(tmp_path, num_drafts=1)
    with torch.no_grad():
        model.vision_final_layernorm.weight.fill_(1)
        model.vision_final_layernorm.bias.zero_()
    (wanted,) = expected(model, [image])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("weight", "bias"):
        del tensors[f"vision_final_layernorm.{name}"]
    save_file(tensors, file)
    assert relative_error(encode(load(tmp_path), image), wanted) < 1e-5


PROMPTS = {
    "one": prompt(20, prepared(16, 24), 30),
    "several": prompt(7, prepared(31, 17, 1), 3, prepared(40, 40, 2), prepared(7, 5, 3), 40),
    "first": prompt(prepared(40, 40), 12),
    "last": prompt(30, prepared(16, 24)),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_logits_match_transformers(kind: str, tmp_path: Path) -> None:
    given = PROMPTS[kind]
    wanted = expected_logits(save(tmp_path), given)
    own = chunked_logits(load(tmp_path), SETTINGS, given, [0, len(given.token_ids)])
    assert relative_error(own, wanted) < 1e-4
    assert wanted.std() > 0.5, "flat logits would show nothing"


def test_logits_in_chunks_that_cut_a_picture_match_transformers(tmp_path: Path) -> None:
    given = prompt(55, prepared(40, 40, 1), 42, prepared(40, 40, 2), 30)
    wanted = expected_logits(save(tmp_path), given)
    ends = [
        offset + each.num_tokens for offset, each in zip(given.offsets, given.images, strict=True)
    ]
    assert given.offsets[0] < 64 < ends[0]
    assert given.offsets[1] < 128 < ends[1]
    own = chunked_logits(load(tmp_path), SETTINGS, given, [0, 64, 128, len(given.token_ids)])
    assert relative_error(own, wanted) < 1e-4


def test_scales_of_layers_that_are_not_one_are_refused(tmp_path: Path) -> None:
    model = save(tmp_path)
    with torch.no_grad():
        model.vision_model.encoder.layer[1].layer_scale2.lambda1[5] = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="layer_scale"):
        load(tmp_path)
    load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"hidden_act": "gelu_pytorch_tanh"}}, "vision_config.hidden_act="),
        ({"vision_config": {"use_swiglu_ffn": True}}, "vision_config.use_swiglu_ffn=True"),
        ({"vision_config": {"qkv_bias": False}}, "vision_config.qkv_bias=False"),
        ({"vision_config": {"num_attention_heads": 24}}, "vision_config.num_attention_heads=24"),
        ({"vision_config": {"mlp_ratio": 0.0}}, "vision_config.mlp_ratio=0"),
        ({"vision_config": {"num_cls_tokens": 0}}, "vision_config.num_cls_tokens=0"),
        ({"downsample_ratio": 0.25}, ": downsample_ratio=0.25"),
        ({"vision_hidden_size": 40}, ": vision_hidden_size=40"),
    ],
)
def test_settings_that_are_not_run_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save(tmp_path)
    refuse_tower(tmp_path, changes, words)
