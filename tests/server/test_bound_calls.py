"""Forms of answers that may have calls: of strict functions, and beside a response_format."""

import functools
import json

import llguidance.hf
import pytest
from llguidance import LLMatcher

from milepost.engine.constraints.grammars import grammar_of
from milepost.errors import InvalidRequestError
from milepost.server import forms
from milepost.server.messages import toolset_of
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.protocol import ChatRequest
from tests import chatmodel
from tests.server.parsing.written import hermes, kimi, lfm2, ling, olmo3, parsed, xml

USER = [{"role": "user", "content": "a"}]
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}


def nemotron(name, arguments):
    return f"<TOOLCALL>[{json.dumps({'name': name, 'arguments': arguments})}]</TOOLCALL>"


def granite(name, arguments):
    return f"<|tool_call|>[{json.dumps({'name': name, 'arguments': arguments})}]"


FAMILIES = {
    "hermes": hermes,
    "qwen3_xml": xml,
    "kimi_k2": kimi,
    "ling3": ling,
    "lfm2": functools.partial(lfm2, write=json.dumps),
    "olmo3": functools.partial(olmo3, write=json.dumps),
    "nemotron_json": nemotron,
    "granite": granite,
}


@functools.cache
def tokenizer_of(calls, is_token):
    """With the family's tags as special tokens, or spelled in several."""
    tokenizer = chatmodel.make_tokenizer()
    form = AnswerFormat(reasoning="none", calls=calls).tool_calls
    if is_token:
        tags = [form.open, form.close]
        tags += [*form.call, form.arguments] if calls == "kimi_k2" else []
        tokenizer.add_special_tokens({"additional_special_tokens": [tag for tag in tags if tag]})
    return tokenizer


@functools.cache
def library_of(calls, is_token):
    return llguidance.hf.from_tokenizer(tokenizer_of(calls, is_token))


class Answers:
    """Which texts may be answers to a request."""

    def __init__(self, calls, *, is_token=True, is_open=False, **request):
        self.tokenizer = tokenizer_of(calls, is_token)
        chat = ChatRequest(messages=USER, **request)
        format_ = AnswerFormat(reasoning="qwen3", calls=calls)
        self.wanted = forms.of_chat(
            chat, toolset_of(chat), format_, self.tokenizer, is_open=is_open
        )
        if self.wanted is not None:
            grammar = grammar_of(self.wanted)
            self.matcher = LLMatcher(library_of(calls, is_token), grammar, log_level=0)
            assert not self.matcher.is_error(), self.matcher.get_error()

    def begin(self, text):
        matcher = self.matcher.deep_copy()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None

    def are(self, text):
        matcher = self.begin(text)
        return matcher is not None and matcher.is_accepting()


SPELLED = {"hermes", "olmo3", "nemotron_json", "granite", "lfm2", "qwen3_xml"}
CASES = [(calls, True) for calls in FAMILIES] + [(calls, False) for calls in sorted(SPELLED)]


@pytest.mark.parametrize(("calls", "is_token"), CASES)
def test_a_strict_function_binds_calls_and_no_text(calls, is_token):
    write, answers = FAMILIES[calls], Answers(calls, is_token=is_token, tools=[TOOL, OTHER])
    call = write("f", {"n": 1, "s": "x < y"})
    for text in ("", "plain text with <b> and {braces}\n\nand more", call, f"first\n{call}"):
        assert answers.are(text), text
    assert answers.are(write("g", {"any": [1]})), "a function that is not strict"
    if calls != "granite":  # whose calls go to the end of the answer
        assert answers.are(f"{call}\n{write('f', {'n': 2})}")
        assert answers.are(f"{call}\nthen text")
    for wrong in ({"n": "one"}, {"s": "x"}, {"n": 1, "other": 2}):
        assert answers.begin(write("f", wrong)) is None, wrong
        assert answers.begin(f"text {write('f', wrong)}") is None, wrong
    form = AnswerFormat(reasoning="none", calls=calls).tool_calls
    assert answers.begin(form.open + "!") is None
    half = answers.begin(call[: call.index("x <") + 1])
    assert half is not None
    assert not half.is_accepting()
    _, content, found = parsed(
        AnswerFormat(reasoning="none", calls=calls), [f"first\n{call}"], [TOOL]
    )
    assert (content.strip(), json.loads(found[0][1])) == ("first", {"n": 1, "s": "x < y"})


@pytest.mark.parametrize("calls", ["hermes", "qwen3_xml", "olmo3"])
def test_one_call_at_most_is_bound_too(calls):
    write = FAMILIES[calls]
    answers = Answers(calls, is_token=False, tools=[TOOL], parallel_tool_calls=False)
    assert answers.are(write("f", {"n": 1}))
    assert answers.begin(write("f", {"n": "x"})) is None


def test_reasoning_may_stand_in_an_answer_that_is_bound():
    answers = Answers("hermes", tools=[TOOL])
    assert answers.are("<think>\nhm\n</think>\n\nyes " + hermes("f", {"n": 1}))
    after = Answers("hermes", tools=[TOOL], is_open=True)
    assert after.wanted.starts_after == after.tokenizer.convert_tokens_to_ids("</think>")


def test_nothing_is_bound_without_a_strict_function():
    assert Answers("hermes", tools=[OTHER]).wanted is None
    assert Answers("hermes", tools=[TOOL], tool_choice="none").wanted is None


def test_tools_that_are_not_allowed_are_not_called():
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answers = Answers("hermes", tools=[TOOL, OTHER], tool_choice=choice)
    assert answers.are("text")
    assert answers.are(hermes("g", {}))
    assert answers.begin(hermes("f", {"n": 1})) is None
    choice = {**choice, "allowed_tools": {**allowed, "mode": "required"}}
    answers = Answers("hermes", tools=[TOOL, OTHER], tool_choice=choice)
    assert answers.begin("text") is None
    assert answers.are(hermes("g", {}))


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
SCHEMA["additionalProperties"] = False
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("calls", [*FAMILIES])
def test_an_answer_has_the_form_or_is_a_call(calls):
    write = FAMILIES[calls]
    answers = Answers(calls, tools=[TOOL], response_format=FORM)
    assert answers.are('{"ok": true}')
    assert answers.are(write("f", {"n": 1}))
    assert answers.begin("text") is None
    assert answers.begin('{"n": 1}') is None
    assert answers.begin(write("f", {"n": "x"})) is None
    required = Answers(calls, tools=[TOOL], response_format=FORM, tool_choice="required")
    assert required.begin('{"ok"') is None
    assert required.are(write("f", {"n": 1}))
    none = Answers(calls, tools=[TOOL], response_format=FORM, tool_choice="none")
    assert none.begin(write("f", {"n": 1})) is None
    assert none.are('{"ok": true}')


def test_white_space_can_be_switched_off():
    wanted = {"json": SCHEMA, "disable_any_whitespace": True}
    for given in (wanted, {**wanted, "json": json.dumps(SCHEMA)}):
        answers = Answers("hermes", structured_outputs=given)
        assert answers.are('{"ok":true}')
        assert answers.begin('{"ok": true}') is None
    free = Answers("hermes", structured_outputs={"json": SCHEMA})
    assert free.are('{ "ok":\ttrue}')
    with pytest.raises(InvalidRequestError, match="disable_any_whitespace"):
        Answers("hermes", structured_outputs={"regex": "a", "disable_any_whitespace": True})


def test_a_demanded_call_does_not_go_with_structured_outputs():
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        Answers("hermes", tools=[TOOL], tool_choice="required", structured_outputs={"regex": "a"})
