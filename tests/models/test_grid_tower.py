"""LFM3-VL, whose tower convolves a picture over its grid: embeddings and logits beside
transformers', and hits that change no answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost import LLM, SamplingParams
from milepost.config import EngineConfig
from milepost.engine.assembly.images import image_facts
from milepost.images import PreparedImage, normalisation
from milepost.images.patches import from_frames
from milepost.models import Decoder, LoadOptions, load_config, load_model
from tests import checkpoints, pictured
from tests.images.pictures import pixels
from tests.numbers import relative_error
from tests.pictured import SETTINGS, grids, pixel_values
from tests.pictured_prompts import answer, asked, image, open_llm

VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "patch_size": SETTINGS.patch_size,
    "initializer_range": 0.2,
}
SIZES = [(2, 3), (3, 2), (1, 8), (5, 5), (8, 1), (1, 1), (7, 9)]
"""Rows and columns in tokens."""
SCORED = SamplingParams(
    temperature=0,
    max_tokens=4,
    ignore_eos=True,
    prompt_logprobs=0,
    allowed_token_ids=list(range(pictured.IMAGE)),
)


def save(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Saves a model with a random tower; skips the test without its class."""
    model = checkpoints.build("lfm3_vl", dtype, vision=VISION, ids=pictured._IDS)
    model.save_pretrained(folder)
    videos = pictured.save_settings(folder) | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lfm3_vl")
    model = save(folder)
    model.folder = folder
    return model


@pytest.fixture(scope="module")
def model(reference: Any) -> Decoder:
    return load_model(reference.folder, LoadOptions(has_tower=True))[0]


def encode(model: Decoder, images: list[PreparedImage], *, is_fixed: bool = False) -> list[Tensor]:
    assert model.tower is not None
    table = torch.from_numpy(normalisation(SETTINGS)).to(model.dtype)
    rows = torch.cat([torch.from_numpy(each.rows) for each in images])
    made = model.tower(rows, table, [each.grid for each in images], is_fixed=is_fixed)
    return list(made.split([each.num_tokens for each in images]))


@torch.no_grad()
def expected(reference: Any, images: list[PreparedImage]) -> list[Tensor]:
    values = pixel_values(images)
    return list(reference.model.get_image_features(values, grids(images)).pooler_output)


def frames() -> PreparedImage:
    """A pair of a video's frames."""
    return from_frames([pixels(24, 32, seed) for seed in (5, 6)], SETTINGS)


def test_embeddings_match_transformers(reference: Any, model: Decoder) -> None:
    images = [pictured.image(*size, seed) for seed, size in enumerate(SIZES)]
    for each, own in zip(images, expected(reference, images), strict=True):
        for is_fixed in (False, True):
            (found,) = encode(model, [each], is_fixed=is_fixed)
            assert relative_error(found, own) < 1e-5
        assert own.std() > 0.3, "flat embeddings would show nothing"


def test_embeddings_of_frames_match_transformers(reference: Any, model: Decoder) -> None:
    pair = frames()
    (own,) = encode(model, [pair])
    assert relative_error(own, expected(reference, [pair])[0]) < 1e-5
    first = replace(
        pair,
        rows=pair.rows.reshape(len(pair.rows), 3, 2, -1)[:, :, 0]
        .reshape(len(pair.rows), -1)
        .copy(),
    )
    assert relative_error(encode(model, [first])[0], own) > 1e-2, "both frames count"


def test_pictures_that_are_encoded_together_have_the_bits_of_each_alone(model: Decoder) -> None:
    images = [pictured.image(*size, seed) for seed, size in enumerate(SIZES)]
    alone = [encode(model, [each], is_fixed=True)[0] for each in images]
    for chosen in ([0, 1, 2, 3, 4, 5, 6], [6, 4, 2, 0], [1, 1]):
        made = encode(model, [images[each] for each in chosen], is_fixed=True)
        for each, own in zip(chosen, made, strict=True):
            assert torch.equal(own, alone[each])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in float64."""
    folder = tmp_path_factory.mktemp("wide")
    model = save(folder, torch.float64)
    model.folder = folder
    return model


@pytest.fixture(scope="module")
def cold(wide: Any) -> LLM:
    with open_llm(wide.folder, enable_prefix_caching=False) as llm:
        yield llm


@torch.no_grad()
def expected_logprobs(reference: Any, token_ids: list[int], images: list[PreparedImage]) -> Tensor:
    logits = reference(
        input_ids=torch.tensor([token_ids]),
        pixel_values=pixel_values(images).double(),
        image_grid_thw=grids(images),
        use_cache=False,
    ).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("sizes", [[(5, 7)], [(8, 8), (3, 2), (1, 6)]])
def test_logits_match_transformers(wide: Any, cold: LLM, sizes: list[tuple[int, int]]) -> None:
    """In chunks that cut pictures, and a few decodes after them."""
    shown = [image(*size, seed) for seed, size in enumerate(sizes)]
    parts = [part for each in shown for part in (25, each)]
    (output,) = cold.generate(asked(*parts, 80), SCORED, use_tqdm=False)
    prompt, answered = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    images = [pictured.image(*size, seed) for seed, size in enumerate(sizes)]
    assert len(prompt) > 128
    wanted = expected_logprobs(wide, prompt + answered, images)
    found = [
        each[token].logprob
        for each, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    own = torch.tensor(found, dtype=torch.float64)
    truth = wanted[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (own - truth).abs().max() < 1e-4
    assert answered == wanted[len(prompt) - 1 : -1, : pictured.IMAGE].argmax(-1).tolist()
    assert truth.std() > 0.5, "flat logits would show nothing"


def test_tokens_of_pictures_and_of_frames_have_positions_like_text(reference: Any) -> None:
    config, folder = EngineConfig(model=str(reference.folder)), reference.folder
    facts = image_facts(config, folder, load_config(folder), None)
    assert facts.video is not None
    assert not facts.settings.has_rows
    assert not facts.video.settings.has_rows


def test_hits_change_no_answer(wide: Any, cold: LLM) -> None:
    one, other = image(8, 8, 1), image(8, 8, 2)
    with open_llm(wide.folder) as llm:
        for before in (0, 1, 40, 62, 64):
            answer(llm, asked(before, one, 40))
            for last in ([5] * 30, [6] * 30):
                ids, report = answer(llm, asked(before, one, last))
                assert ids == answer(cold, asked(before, one, last))[0]
            assert report.images_reused == 1
            ids, report = answer(llm, asked(before, other, [5] * 30))
            assert ids == answer(cold, asked(before, other, [5] * 30))[0]
            assert report.image_tokens_reused == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"layer_types": ["conv", "mamba"] * 2}}, "layer_types"),
        ({"vision_config": {"num_attention_heads": 24}}, "vision_config.num_attention_heads=24"),
        ({"vision_config": {"num_key_value_heads": 3}}, "vision_config.num_key_value_heads=3"),
        ({"vision_config": {"conv_kernel_size": 4}}, "vision_config.conv_kernel_size=4"),
        ({"projector_bias": False}, ": projector_bias=False"),
        ({"projector_hidden_act": "silu"}, ": projector_hidden_act='silu'"),
    ],
)
def test_settings_that_are_not_run_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save(tmp_path)
    pictured.refuse_tower(tmp_path, changes, words)
