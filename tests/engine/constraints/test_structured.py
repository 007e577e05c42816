"""Answers that keep to a form."""

import json
import re

import numpy as np
import pytest

from milepost import LLM, SamplingParams
from milepost.engine.constraints import grammars
from milepost.engine.constraints.guidance import FormGuide, form_masks
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


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "a?<tool_call>x"},
        {"choice": ["<|im_start|>user<|im_end|>"]},
        {"json": {"const": "</think>"}},
    ],
)
def test_the_text_of_an_added_token_is_spelled(llm, wanted):
    text = next(iter(wanted.values()))
    output = llm.generate(
        "what is the weather",
        SamplingParams(structured_outputs=StructuredOutputs(**wanted), max_tokens=99, seed=1),
        use_tqdm=False,
    )[0].outputs[0]
    assert output.finish_reason == "stop"
    if "regex" in wanted:
        assert re.fullmatch(text, output.text)
    else:
        assert output.text == (text[0] if "choice" in wanted else json.dumps(text["const"]))
    assert not set(output.token_ids[:-1]) & set(llm.get_tokenizer().added_tokens_decoder)


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
def test_forms_that_cannot_be_followed_are_refused(llm, wanted):
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        llm.generate("a", SamplingParams(structured_outputs=wanted), use_tqdm=False)


def test_a_regex_that_is_none_says_why(llm):
    with pytest.raises(InvalidRequestError, match=r"regex parse error: unclosed group$"):
        answer(llm, StructuredOutputs(regex="(ab"))


def test_a_one_of_that_is_not_followed_says_what_to_use(llm):
    """llguidance follows it where no value matches two of them, and names its own option else."""
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(InvalidRequestError, match=r"where several may match: use anyOf$"):
        answer(llm, StructuredOutputs(json=schema))


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_a_form_says_where_an_answer_ends(llm, options):
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **options)
    with pytest.raises(InvalidRequestError, match="it says where an answer ends"):
        llm.generate("a", params, use_tqdm=False)


def test_a_form_is_compiled_once(llm):
    """Whatever the number of answers and of requests, and wherever it begins."""
    wanted = StructuredOutputs(json={"enum": ["compiled", "once"]})
    answer(llm, wanted, seed=1)
    num_compiled = llm.llm_engine._intake.forms.num_compiled
    params = SamplingParams(structured_outputs=wanted, n=4, seed=2, max_tokens=40)
    llm.generate(["a", "b"], params, use_tqdm=False)
    answer(llm, StructuredOutputs(json={"enum": ["compiled", "once"]}, field="other"), seed=1)
    assert llm.llm_engine._intake.forms.num_compiled == num_compiled


def test_forms_are_forgotten_and_made_anew(llm, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_KNOWN", 2)
    monkeypatch.setattr(grammars, "MAX_FOLLOWED", 2)
    tokenizer = llm.get_tokenizer()
    forms = grammars.Forms(grammars.vocabulary_of(tokenizer, len(tokenizer), ()))
    first, second, third = (StructuredOutputs(regex=text) for text in ("a", "b", "c"))
    known = forms.compile(first)
    forms.compile(second)
    assert forms.compile(first) is known
    forms.compile(third)
    assert forms.compile(first) is known
    assert forms.num_compiled == 3
    forms.compile(second)
    assert forms.num_compiled == 4
    known.num_followed = 2
    assert forms.compile(first) is not known


LIMITED = StructuredOutputs(regex=r"[\s\S]*[a-z][\s\S]{200}[0-9]", field="response_format")


def test_a_form_that_becomes_too_complex_is_an_error(llm, monkeypatch):
    """And no answer that looks like one: it ended as what there was of it, with `stop`."""
    grammars._limits.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(grammars.LIMITS, "max_lexer_states", 200)
            params = SamplingParams(structured_outputs=LIMITED, seed=1, max_tokens=400)
            output = llm.generate("a", params, use_tqdm=False)[0].outputs[0]
    finally:
        grammars._limits.cache_clear()
    assert output.finish_reason == "error"
    assert output.stop_reason.startswith("response_format: too complex")
    assert "max_lexer_states" in output.stop_reason
    assert answer(llm, StructuredOutputs(choice=["yes"])) == "yes"
    assert llm.llm_engine._intake.forms.compile(LIMITED).num_followed == 0


def test_a_tokenizer_may_have_more_tokens_than_the_model(llm):
    """The mask is cut; before, the first form ended the engine."""
    tokenizer = llm.get_tokenizer()
    size = len(tokenizer) - 1
    vocabulary = grammars.vocabulary_of(tokenizer, size, ())
    assert vocabulary.num_tokens == len(tokenizer)
    form = grammars.Forms(vocabulary).compile(StructuredOutputs(choice=["yes"]))
    (mask,) = form_masks([FormGuide(form, size, (0,), None)])
    assert len(mask) == -(-size // 32)
    assert 0 < int(np.unpackbits(mask.view(np.uint8)).sum()) < 10


def test_exactly_one_form():
    with pytest.raises(InvalidRequestError, match="exactly one"):
        StructuredOutputs()
    with pytest.raises(InvalidRequestError, match="exactly one"):
        StructuredOutputs(regex="a", choice=["b"])
