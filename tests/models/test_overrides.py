"""Settings in place of those in `config.json`: answers are those of a file that says so."""

import json

import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.layers.rotary import num_positions
from milepost.models import load_config
from tests import checkpoints

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain checkpoint, and the same whose file says what is overridden."""
    plain, edited = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("edited")
    model = checkpoints.build("qwen3_next", torch.float64, max_position_embeddings=128)
    for folder in (plain, edited):
        checkpoints.write(model, "qwen3_next", folder)
    raw = json.loads((edited / "config.json").read_text())
    raw["rope_parameters"] |= YARN
    (edited / "config.json").write_text(json.dumps(raw))
    return plain, edited


def answer(folder, prompt_len=150, **options):
    llm = LLM(model=str(folder), skip_tokenizer_init=True, cpu_cache_gib=0.01, **options)
    prompt = {"prompt_token_ids": [7 * i % 101 for i in range(prompt_len)]}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([prompt], params)
    llm.llm_engine.close()
    return output


def test_answers_are_those_of_a_file_that_says_so(folders):
    plain, edited = folders
    wanted = answer(edited, max_model_len=256).outputs[0].token_ids
    given = answer(plain, max_model_len=256, hf_overrides={"rope_parameters": YARN})
    assert given.outputs[0].token_ids == wanted
    with pytest.raises(ConfigError, match=r"own limit is 128 positions.*hf_overrides"):
        answer(plain, max_model_len=256)


def test_what_was_cached_under_other_settings_is_not_used(folders, tmp_path):
    plain, _ = folders
    own = {"page_size": 16, "cache_dir": str(tmp_path), "cache_host_gib": 0.01}
    overrides = {"hf_overrides": {"rope_parameters": {"rope_theta": 500.0}}}
    reused = [answer(plain, 100, **own, **more).num_cached_tokens for more in ({}, overrides, {})]
    assert reused[:2] == [0, 0]
    assert reused[2] > 0


def test_of_the_text_in_a_multimodal_checkpoint(tmp_path):
    """As cards of Qwen3.5 print it for a million tokens."""
    checkpoints.save("qwen3_5_multimodal", tmp_path)
    card = {
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "yarn",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    }
    text = load_config(tmp_path, {"text_config": card}).get_text_config()
    assert num_positions(text) == 4096
    assert text.rope_parameters["rope_theta"] == 10000000
    assert text.hidden_size == load_config(tmp_path).get_text_config().hidden_size
    with pytest.raises(ConfigError, match=r"no rope_parameters .* stand in text_config"):
        load_config(tmp_path, card)
    with pytest.raises(ConfigError, match=r"no text_config\.rope_theta_factor to override"):
        load_config(tmp_path, {"text_config": {"rope_theta_factor": 1}})


def test_what_is_no_object():
    assert EngineConfig(hf_overrides="{}").hf_overrides is None
    for given in ("[1]", "{", 5, {"a": {1}}, {"a": float("nan")}):
        with pytest.raises(ConfigError, match="hf_overrides="):
            EngineConfig(hf_overrides=given)
