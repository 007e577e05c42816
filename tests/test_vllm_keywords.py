"""Keywords that scripts for vLLM pass to the calls that ours share with it."""

import inspect

import pytest

from milepost import LLM, SamplingParams, StructuredOutputs
from milepost.errors import InvalidRequestError


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutputs])
def test_keywords_that_change_nothing_are_taken(kind):
    if kind is SamplingParams:
        given = {"best_of": 1, "guided_decoding": None, "skip_clone": True, "output_kind": 0}
        assert SamplingParams(temperature=0, **given) == SamplingParams(temperature=0)
    else:
        form = StructuredOutputs(regex="a", json_object=None, disable_fallback=True)
        assert form == StructuredOutputs(regex="a")
    assert "best_of" not in inspect.signature(kind).parameters


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"best_of": 4}, "best_of=4 is not supported: use n, and choose"),
        ({"guided_decoding": "a"}, "guided_decoding='a' is not supported: use structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search=True is not supported: use n"),
        ({"temprature": 1}, "'temprature' is unknown: did you mean temperature"),
        ({"zzz": 1}, "'zzz' is unknown: use temperature, top_p, "),
        ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag='a' .*: use grammar"),
    ],
)
def test_others_are_refused_with_what_to_do(given, said):
    with pytest.raises(InvalidRequestError, match=said):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("generate", {"lora_request": "a"}, "lora_request='a' is not supported: merge the adapter"),
        ("generate", {"prompt_token_ids": [1]}, 'pass {"prompt_token_ids": '),
        ("generate", {"use_tqmd": False}, "'use_tqmd' is unknown: did you mean use_tqdm"),
        ("chat", {"chat_templat": "a"}, "'chat_templat' is unknown: did you mean chat_template"),
        ("stream_chat", {"priority": 3}, "priority=3 is not supported: prompts of one LLM"),
        ("stream", {"lora_request": "a"}, "merge the adapter"),
    ],
)
def test_methods_answer_before_they_begin(name, given, said):
    with pytest.raises(InvalidRequestError, match=said):
        getattr(LLM, name)(None, "a prompt", **given)


def test_a_method_that_gets_what_changes_nothing_begins():
    with pytest.raises(AttributeError, match="_read"):
        LLM.generate(object(), "a prompt", lora_request=None, priority=0)
