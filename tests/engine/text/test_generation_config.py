"""What a checkpoint says about sampling and the end of answers reaches the requests."""

import json

import pytest

from milepost import LLM, SamplingParams
from milepost.engine.text.generation_config import (
    end_token_ids,
    sampling_defaults,
    within_vocabulary,
)
from milepost.errors import ConfigError
from tests import chatmodel
from tests.mutations import copy


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


@pytest.mark.parametrize(
    "given", ["<x>", "70", -1, [1, "<x>"], [[1]], True, {"a": 1}, 2**40, 1.0, [None]]
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_that_is_none_is_refused(name, given, tokenizer, tmp_path):
    write(tmp_path, name, {"eos_token_id": given})
    for own in (None, tokenizer):
        with pytest.raises(ConfigError) as caught:
            end_token_ids(tmp_path, own)
        for word in (str(tmp_path / name), "eos_token_id=", "use a token id"):
            assert word in str(caught.value)


def test_an_end_token_may_be_named_by_its_text(tokenizer, tmp_path):
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    write(tmp_path, "generation_config.json", {"eos_token_id": ["<|endoftext|>", 70]})
    assert end_token_ids(tmp_path, tokenizer) == tuple(sorted({other, 70, end}))
    assert end_token_ids(tmp_path, tokenizer, {"eos_token_id": "<|im_end|>"}) == (end,)


def test_a_text_part_that_is_none_says_nothing(tmp_path):
    write(tmp_path, "config.json", {"text_config": [1]})
    assert end_token_ids(tmp_path, None) == ()


def test_end_tokens_that_the_model_does_not_have_are_left_out(caplog):
    assert within_vocabulary((3, 99, 100), 100) == (3, 99)
    assert "[100] are left out: the model has 100 tokens" in caplog.text


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        end_token_ids(tmp_path, None)


@pytest.mark.parametrize("given", [{"top_p": "much"}, {"top_k": [1]}, {"temperature": {}}])
def test_a_default_of_another_type_is_refused(given, tmp_path):
    write(tmp_path, "generation_config.json", given)
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*'none'"):
        sampling_defaults(tmp_path, "auto")


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


def test_an_end_token_beyond_the_vocabulary_is_no_matter(folder, tmp_path):
    copy(folder, tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").unlink()
    write(tmp_path / "copy", "generation_config.json", {"eos_token_id": [7, 2**20]})
    llm = LLM(tmp_path / "copy", cpu_cache_gib=0.02)
    assert max(llm.llm_engine._intake._end_token_ids) < llm.llm_engine.limits.vocab_size
    assert answer(llm, SamplingParams(max_tokens=2, min_tokens=1, structured_outputs=None))


def test_they_can_be_left_out(folder):
    llm = LLM(folder, cpu_cache_gib=0.02, generation_config="none")
    assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="generation_config='off': use one of auto, none, vllm"):
        LLM(folder, generation_config="off")
