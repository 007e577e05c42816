"""A request is judged once, at the door, and told what is wrong with it."""

from dataclasses import replace

import pytest

from milepost.config import EngineConfig
from milepost.engine.prompts import Prompt
from milepost.engine.validation import MAX_SCORES, Limits, validate
from milepost.errors import InvalidPromptError, InvalidRequestError
from milepost.sampling_params import SamplingParams, StructuredOutputs

LIMITS = Limits(
    vocab_size=100,
    max_model_len=20,
    max_cache_marks=2,
    has_tokenizer=True,
    closes_reasoning=True,
)
PROMPT = Prompt(token_ids=[1, 2, 3])


def test_what_is_within_the_limits_passes():
    params = SamplingParams(stop=["a"], thinking_token_budget=4, logit_bias={99: 1.0})
    validate(replace(PROMPT, cache_marks=(1, 3)), params, LIMITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "the prompt is empty"),
        ({"token_ids": [1, 100]}, r"prompt_token_ids\[1\]=100: the vocabulary has 100"),
        ({"token_ids": [1, True]}, r"prompt_token_ids\[1\]=True: use integers"),
        ({"cache_marks": (4,)}, "cache_marks has 4"),
        ({"cache_marks": (1, 2, 3)}, "3 cache_marks: use 2 or fewer"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_the_prompts_error(change, message):
    with pytest.raises(InvalidPromptError, match=message) as raised:
        validate(replace(PROMPT, **change), SamplingParams(), LIMITS)
    assert not raised.value.is_too_long


def test_a_prompt_without_room_for_an_answer_is_too_long():
    with pytest.raises(InvalidPromptError, match="shorten it to 19") as raised:
        validate(Prompt(token_ids=[1] * 20), SamplingParams(), LIMITS)
    assert raised.value.is_too_long


FORM = StructuredOutputs(regex="a")


@pytest.mark.parametrize(
    ("params", "limits", "message"),
    [
        ({"stop": ["a"]}, {"has_tokenizer": False}, "stop strings need a tokenizer"),
        ({"thinking_token_budget": 4}, {"closes_reasoning": False}, "budget=4: this model has no"),
        ({"logit_bias": {100: 1.0}}, {}, "logit_bias"),
        ({"structured_outputs": FORM, "min_tokens": 1}, {}, "leave out ignore_eos and min_tokens"),
    ],
)
def test_parameters_that_cannot_be_served_are_no_error_of_the_prompt(params, limits, message):
    with pytest.raises(InvalidRequestError, match=message) as raised:
        validate(PROMPT, SamplingParams(**params), replace(LIMITS, **limits))
    assert not isinstance(raised.value, InvalidPromptError)


def test_stop_strings_without_a_tokenizer_are_refused():
    """Nobody behind the door would notice: an answer without text has no stop string in it."""
    config = EngineConfig(skip_tokenizer_init=True)
    limits = Limits.of(config, vocab_size=100, max_model_len=20, closes_reasoning=False)
    validate(PROMPT, SamplingParams(stop_token_ids=[7]), limits)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        validate(PROMPT, SamplingParams(stop="END"), limits)


def test_log_probabilities_of_a_prompt_are_bounded_in_all():
    limits = replace(LIMITS, max_model_len=2**20)
    num = MAX_SCORES // 21 + 1
    with pytest.raises(InvalidRequestError, match="prompt_logprobs=20"):
        validate(Prompt(token_ids=[1] * num), SamplingParams(prompt_logprobs=20), limits)


def test_what_other_engines_have_is_refused_where_nothing_is_exchanged():
    prompt = replace(PROMPT, kv_transfer_params={"do_remote_decode": True})
    with pytest.raises(InvalidRequestError, match="exchanges nothing"):
        validate(prompt, SamplingParams(), LIMITS)
