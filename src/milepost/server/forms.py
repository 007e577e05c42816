"""The form that an answer must match: from response_format, from a tool choice that requires a
call, or from tools whose calls must match a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams, StructuredOutputs
from milepost.server.messages import Toolset
from milepost.server.parsing import lark
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parsing.formats import ToolCalls
from milepost.server.parts import ResponseFormat
from milepost.server.protocol import ChatRequest, Sampling
from milepost.server.tools import NamedToolChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
"""llguidance's options for JSON without white space."""


def of_request(request: Sampling) -> StructuredOutputs | None:
    """Returns the form in `response_format` or `structured_outputs`. Raises InvalidRequestError for
    both."""
    form, wanted = of_response_format(request.response_format), request.structured_outputs
    if wanted is None:
        return form
    if form is not None:
        raise InvalidRequestError(
            "structured_outputs={...}: response_format is set too, use one of them"
        )
    schema = {"type": "object"} if wanted.json_object else wanted.json_
    if wanted.disable_any_whitespace:
        schema = _compact(schema)
    return StructuredOutputs(
        json=schema, regex=wanted.regex, choice=wanted.choice, grammar=wanted.grammar
    )


def _compact(schema: dict[str, Any] | str | None) -> dict[str, Any]:
    """Returns the schema for JSON without white space. Raises InvalidRequestError."""
    field = "structured_outputs.disable_any_whitespace"
    if schema is None:
        raise InvalidRequestError(f"{field}: use it with json or json_object")
    try:
        found = from_json(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise InvalidRequestError(f"structured_outputs.json: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{field}: use it with a schema that is an object")
    return {**found, "x-guidance": _COMPACT}


def of_response_format(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    """Returns None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return StructuredOutputs(json={"type": "object"})
    return StructuredOutputs(json=wanted.json_schema.schema_)


def of_chat(
    request: ChatRequest,
    tools: Toolset,
    format_: AnswerFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_open: bool,
) -> StructuredOutputs | None:
    """Returns the form of an answer, or None. With `is_open` it begins after the reasoning. Raises
    InvalidRequestError.

    If a call is required, it is the answer, and a `response_format` applies to a later turn. If a
    call is only allowed, the answer is a call or has that format.
    """
    form = of_request(request)
    if tools.is_demanded and request.structured_outputs is not None:
        raise InvalidRequestError(
            f"tool_choice={_name(request)!r}: it cannot be combined with structured_outputs"
        )
    if tools.is_demanded:
        form = _calls_form(request, tools, format_, tokenizer, is_open=is_open)
    elif tools.callable and request.structured_outputs is None:
        if form is not None and format_.tool_calls is not None:
            form = _union(form, _calls(tools, format_.tool_calls, tokenizer), is_open=is_open)
        elif tools.is_bound and format_.tool_calls is not None:
            form = _bound(tools, format_, tokenizer)
    if form is not None and is_open:
        end = _end_of_reasoning(format_, tokenizer, field_of(request))
        form = replace(form, starts_after=end)
    return form


def field_of(request: Sampling) -> str:
    """Returns the field that asks for the form."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    choice = getattr(request, "tool_choice", None)
    if request.response_format is not None and choice in (None, "none", "auto"):
        return "response_format"
    return "tools" if choice in (None, "none", "auto") else "tool_choice"


def apply(params: SamplingParams, form: StructuredOutputs | None) -> SamplingParams:
    """Raises InvalidRequestError for parameters that cannot be combined with a form."""
    return params if form is None else replace(params, structured_outputs=form)


def _name(request: ChatRequest) -> str:
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return choice.name or choice.type
    return str(choice)


def _calls_form(
    request: ChatRequest,
    tools: Toolset,
    format_: AnswerFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_open: bool,
) -> StructuredOutputs:
    """Returns the form of required calls: one call if a function is named or parallel calls are not
    wanted."""
    if format_.tool_calls is None:
        name = _name(request)
        raise InvalidRequestError(f"tool_choice={name!r}: this model's template has no tool calls")
    rules = _calls(tools, format_.tool_calls, tokenizer)
    return StructuredOutputs(grammar="\n".join([f"start: {_before(is_open)}calls", *rules]))


def _before(is_open: bool) -> str:
    """Returns a rule for the line breaks that models write after their reasoning."""
    return r'("\n" | "\n\n")? ' if is_open else ""


def _calls(
    tools: Toolset,
    calls: ToolCalls,
    tokenizer: PreTrainedTokenizerBase,
    *,
    opened: str | None = None,
) -> list[str]:
    """Returns rules that define `calls`. `opened` replaces the opening tag."""

    def tag(text: str) -> str:
        return opened if opened is not None and text == calls.open else _tag(tokenizer, text)

    try:
        return list(calls.grammar(tools.callable or (), tag, is_single=tools.is_single))
    except RecursionError as error:
        raise InvalidRequestError("tools: the parameters are nested too deeply") from error


def _union(form: StructuredOutputs, calls: list[str], *, is_open: bool) -> StructuredOutputs:
    """Returns the form of an answer that is either calls or JSON of this form's schema."""
    assert isinstance(form.json, Mapping), "a response_format is a JSON schema"
    rules = [
        f"start: {_before(is_open)}(form | calls)",
        f"form: {lark.json_value(form.json, is_strict=True)}",
    ]
    return StructuredOutputs(grammar="\n".join([*rules, *calls]))


def _bound(
    tools: Toolset, format_: AnswerFormat, tokenizer: PreTrainedTokenizerBase
) -> StructuredOutputs:
    """Returns the form of any text in which whatever begins like a call is one.

    If the tag of a call is a token, text is everything that does not spell it. Otherwise text and
    tag are one lexeme, which ends with the tag, because a lexer does not go back.
    """
    calls = format_.tool_calls
    assert calls is not None, "calls are kept to a form in models that have calls"
    starts = calls.reader(tools.callable or ()).starts
    text = f"{lark.regex('(?s:.+)')} & {_without(starts)}"
    opened = _tag(tokenizer, calls.open)
    if opened == lark.text(calls.open):
        opening = f"opening[suffix={opened}]: {lark.regex('(?s:.*)')}"
        others = [start for start in starts if start != calls.open]
        opening += f" & {_without(others)}" if others else ""
        own = _calls(tools, calls, tokenizer, opened="opening")
        rules = ["start: calls* text", "text: TEXT?", opening]
    else:
        marks = [_tag(tokenizer, tag) for tag in _think_tags(format_)]
        special = "".join(f" | {mark}" for mark in marks if not mark.startswith('"'))
        own = _calls(tools, calls, tokenizer)
        rules = ["start: text (calls text)*", f"text: (TEXT{special})*"]
    return StructuredOutputs(grammar="\n".join([*rules, f"TEXT: {text}", *own]))


def _without(tags: Sequence[str]) -> str:
    """Returns a regex of the texts that contain none of these tags."""
    found = "|".join(re.escape(tag) for tag in tags)
    return f"~{lark.regex(f'(?s:.*)(?:{found})(?s:.*)')}"


def _think_tags(format_: AnswerFormat) -> tuple[str, ...]:
    thinking = format_.thinking
    return () if thinking is None else (thinking.open, thinking.close)


def _tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """Returns a tag for a grammar: as a token if it is one."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return tag if len(ids) == 1 else lark.text(tag)


def _end_of_reasoning(format_: AnswerFormat, tokenizer: PreTrainedTokenizerBase, field: str) -> int:
    assert format_.thinking is not None, "what is open has a format"
    ids = tokenizer.encode(format_.thinking.close, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequestError(
            f"{field}: this model's reasoning does not end with one token: switch the "
            "reasoning off with chat_template_kwargs"
        )
    return ids[0]
