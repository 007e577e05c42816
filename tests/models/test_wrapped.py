"""Text parts of one family in another one's checkpoints: what is left out, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost import SamplingParams
from milepost.errors import InvalidRequestError, UnsupportedModelError, WeightsError
from milepost.models import LoadOptions, load_config, load_model, registry
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, ask, greedy, open_llm, prompt, tokens

WRAPPED = {
    "intern_s2_preview": ("qwen3_5_moe_text", "model.visual.", "time_series"),
    "minicpmv4_6": ("qwen3_5_text", "model.vision_tower.", "model.merger."),
    "minicpmv4_7": ("qwen3_5_text", "model.vision_tower.", "model.merger."),
    "lfm2_vl": ("lfm2", "model.vision_tower.", "model.multi_modal_projector."),
    "nemotron_h_omni": ("nemotron_h", "vision_model.", "mlp1."),
    "lfm3_vl": ("lfm3", "model.vision_tower.", "model.multi_modal_projector."),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_is_read_and_the_rest_left_out_by_name(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    # Towers that are run are left out all the same unless they are asked for.
    has_tower = name in ("lfm2_vl", "lfm3_vl", "nemotron_h_omni")
    model, config = load_model(tmp_path, LoadOptions(has_tower=not has_tower))
    text_type, *left_out = WRAPPED[name]
    assert (config.model_type, config.get_text_config().model_type) == (name, text_type)
    assert model.tower is None
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert all(any(key.startswith(each) for key in tensors) for each in left_out)
    save_file(tensors | {"model.audio.weight": torch.ones(1)}, file)
    with pytest.raises(WeightsError, match=r"model\.audio\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_text_part_of_another_family_is_refused(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"]["model_type"] = "qwen3_next"
    path.write_text(json.dumps(raw))
    wanted = f"'qwen3_next' does not belong to {WRAPPED[name][0]}"
    with pytest.raises(UnsupportedModelError, match=wanted):
        load_config(tmp_path)
    del raw["text_config"]["model_type"]
    path.write_text(json.dumps(raw))
    assert load_config(tmp_path).get_text_config().model_type == WRAPPED[name][0]


def test_nemotrons_text_part_answers_as_transformers(tmp_path: Path) -> None:
    """By its published name in config.json, too."""
    reference = save("nemotron_h_omni", tmp_path, vocab_size=VOCAB_SIZE)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    given = tokens(90)
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([given])).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(given[1:])[:, None])[:, 0]
    for changed in (raw, {name: raw[name] for name in raw if name != "text_config"}):
        if "text_config" not in changed:
            changed["llm_config"] = raw["text_config"]
        path.write_text(json.dumps(changed))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm = open_llm(tmp_path, language_model_only=True)
        (output,) = llm.generate(prompt(given), params, use_tqdm=False)
        found = [
            each[token].logprob
            for each, token in zip(output.prompt_logprobs[1:], given[1:], strict=True)
        ]
        assert (torch.tensor(found) - wanted).abs().max() < 1e-3
    assert wanted.std() > 0.5, "flat logits would show nothing"


def test_a_type_that_an_older_transformers_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("minicpmv4_7", tmp_path)
    monkeypatch.setattr(registry, "CONFIG_MAPPING", {})
    with pytest.raises(UnsupportedModelError, match=r"'minicpmv4_7' is not known to transformers"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["intern_s2_preview", "minicpmv4_6"])
def test_a_head_that_is_not_in_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    with pytest.raises(WeightsError, match=r"mtp\."):
        load_model(tmp_path, LoadOptions(head="mtp"))


@pytest.mark.parametrize("name", ["intern_s2_preview", "minicpmv4_6"])
def test_images_are_refused_and_the_log_says_why(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(name, tmp_path, vocab_size=VOCAB_SIZE)
    with caplog.at_level(logging.WARNING):
        llm = open_llm(tmp_path, num_pages=16, num_slots=4)
    wanted = f"images are refused: the vision tower of model_type='{name}' is not run"
    assert caplog.text.count(wanted) == 1
    prompt = {"prompt_token_ids": tokens(5), "multi_modal_data": {"image": "a.png"}}
    with pytest.raises(InvalidRequestError, match="1 image: this model is served for text only"):
        llm.generate([prompt], greedy(1))
    assert ask(llm, tokens(5), params=greedy(1))
