"""What a checkpoint says about sampling and the end of answers reaches the requests."""

import json

import pytest

from milepost import LLM, SamplingParams
from milepost.engine.generation_config import end_token_ids, sampling_defaults
from milepost.errors import ConfigError
from tests import chatmodel


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def test_end_ids_come_from_the_generation_config_and_the_tokenizer(tokenizer, tmp_path):
    assert end_token_ids(tmp_path, None) == ()
    assert end_token_ids(tmp_path, tokenizer) == (tokenizer.eos_token_id,)
    write(tmp_path, "config.json", {"eos_token_id": 90})
    assert end_token_ids(tmp_path, None) == (90,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [70, 60]})
    assert end_token_ids(tmp_path, None) == (60, 70)
    assert end_token_ids(tmp_path, tokenizer) == (tokenizer.eos_token_id, 60, 70)


def test_end_ids_of_a_multimodal_checkpoint_are_its_texts(tmp_path):
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": 5}})
    assert end_token_ids(tmp_path, None) == (5,)


def test_end_ids_of_an_override_stand_in_place_of_both_files(tokenizer, tmp_path):
    write(tmp_path, "config.json", {"eos_token_id": 90})
    write(tmp_path, "generation_config.json", {"eos_token_id": [70, 60]})
    assert end_token_ids(tmp_path, None, {"eos_token_id": 5}) == (5,)
    assert end_token_ids(tmp_path, None, {"text_config": {"eos_token_id": [8, 7]}}) == (7, 8)
    assert end_token_ids(tmp_path, None, {"eos_token_id": None}) == (60, 70)
    assert end_token_ids(tmp_path, tokenizer, {"eos_token_id": 99}) == (tokenizer.eos_token_id, 99)


@pytest.mark.parametrize("given", ["x", -1, [1, "x"], [[1]], True, {"a": 1}])
def test_an_override_that_is_no_token_id_is_refused(tmp_path, given):
    with pytest.raises(ConfigError, match=r"hf_overrides: eos_token_id=.*: use a token id"):
        end_token_ids(tmp_path, None, {"eos_token_id": given})


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        end_token_ids(tmp_path, None)


OWN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def test_sampling_defaults_are_those_that_the_file_sets(tmp_path):
    assert sampling_defaults(tmp_path, "auto") == {}
    content = {**OWN, "min_p": None, "do_sample": True, "max_new_tokens": 9, "num_beams": 4}
    write(tmp_path, "generation_config.json", content)
    assert sampling_defaults(tmp_path, "auto") == OWN
    assert sampling_defaults(tmp_path, "none") == sampling_defaults(tmp_path, "vllm") == {}


def test_a_default_that_no_request_could_have_is_refused(tmp_path):
    write(tmp_path, "generation_config.json", {"top_p": 1.5})
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=1\.5.*'none'"):
        sampling_defaults(tmp_path, "auto")
    assert sampling_defaults(tmp_path, "none") == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose makers sample from the likeliest token alone."""
    folder = chatmodel.save(tmp_path_factory.mktemp("model"))
    write(folder, "generation_config.json", {"top_k": 1, "temperature": 0.5})
    return folder


def answer(llm, params):
    return llm.generate("the quick brown", params, use_tqdm=False)[0].outputs[0].token_ids


def test_prompts_without_parameters_get_the_defaults(folder):
    llm = LLM(folder, cpu_cache_gib=0.02)
    assert llm.get_default_sampling_params() == SamplingParams(top_k=1, temperature=0.5)
    best = answer(llm, SamplingParams(temperature=0))
    assert answer(llm, None) == best
    assert answer(llm, SamplingParams(seed=1)) != best


def test_an_override_ends_answers(folder):
    """What a greedy answer has as its third token is made its end."""
    params = SamplingParams(temperature=0, max_tokens=8)
    before = answer(LLM(folder, cpu_cache_gib=0.02), params)
    llm = LLM(folder, cpu_cache_gib=0.02, hf_overrides={"eos_token_id": before[2]})
    assert answer(llm, params) == before[: before.index(before[2]) + 1]


def test_they_can_be_left_out(folder):
    llm = LLM(folder, cpu_cache_gib=0.02, generation_config="none")
    assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="generation_config='off': use one of auto, none, vllm"):
        LLM(folder, generation_config="off")
