"""Answers that keep to a form."""

import json
import re

import pytest

from milepost import LLM, SamplingParams
from milepost.engine.guidance import check_structured
from milepost.errors import InvalidRequestError
from milepost.sampling_params import StructuredOutputs
from tests import chatmodel

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "Bern"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = chatmodel.save(tmp_path_factory.mktemp("model"))
    return LLM(str(folder), cpu_cache_gib=0.02, max_num_seqs=4)


def answer(llm, wanted, **options):
    params = SamplingParams(structured_outputs=wanted, max_tokens=200, **options)
    output = llm.generate("what is the weather", params, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    return output.text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}, {"seed": 2}])
def test_json_schema(llm, options):
    found = json.loads(answer(llm, StructuredOutputs(json=SCHEMA), **options))
    assert found["city"] in ("Zürich", "Bern")
    assert 0 <= found["days"] <= 9


def test_white_space_in_json_has_an_end(llm):
    """A model that likes nothing better than spaces still comes to the point."""
    space = llm.get_tokenizer().encode(" ")[0]
    wanted = StructuredOutputs(json=SCHEMA)
    params = SamplingParams(
        structured_outputs=wanted, max_tokens=900, logit_bias={space: 100}, temperature=0
    )
    output = llm.generate("what is the weather", params, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.text.count(" ") > 60
    assert json.loads(output.text)["city"] in ("Zürich", "Bern")


def test_regex_and_choice(llm):
    assert re.fullmatch(r"[a-c]{3}", answer(llm, StructuredOutputs(regex="[a-c]{3}"), seed=3))
    assert answer(llm, StructuredOutputs(choice=["yes", "no"]), seed=3) in ("yes", "no")


def test_logit_bias_does_not_break_the_form(llm):
    wanted = StructuredOutputs(choice=["yes", "no"])
    assert answer(llm, wanted, logit_bias={300: 100}, seed=3) in ("yes", "no")


def test_form_begins_behind_a_token(llm):
    end = llm.get_tokenizer().convert_tokens_to_ids("</think>")
    wanted = StructuredOutputs(choice=["yes"], starts_after=end)
    params = SamplingParams(structured_outputs=wanted, max_tokens=60, logit_bias={end: 30}, seed=0)
    text = llm.generate("hm", params, use_tqdm=False)[0].outputs[0].text
    assert text.partition("</think>")[2] == "yes"


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(json={"type": "nonsense"}),
        StructuredOutputs(json="{"),
        StructuredOutputs(regex="("),
        StructuredOutputs(grammar="begin: x"),
    ],
)
def test_forms_that_cannot_be_followed_are_refused(wanted):
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        check_structured(SamplingParams(structured_outputs=wanted))


def test_exactly_one_form():
    with pytest.raises(InvalidRequestError, match="exactly one"):
        StructuredOutputs()
    with pytest.raises(InvalidRequestError, match="exactly one"):
        StructuredOutputs(regex="a", choice=["b"])
