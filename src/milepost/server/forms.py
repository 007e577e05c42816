"""The form that an answer must match: from response_format, from a tool choice that requires a
call, or from tools whose calls must match a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.server.messages import Toolset
from milepost.server.parsing import lark
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parts import ResponseFormat
from milepost.server.protocol import ChatRequest, Sampling
from milepost.server.tools import NamedToolChoice
from milepost.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
"""llguidance's options for JSON without white space."""


def of_request(request: Sampling) -> StructuredOutputs | None:
    """Returns the form in `response_format` or `structured_outputs`; None without either. Raises
    InvalidRequestError if both are set."""
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
    """Returns the form that a `response_format` asks for; None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        schema = {"type": "object"} if wanted.schema_ is None else wanted.schema_
        return StructuredOutputs(json=schema)
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
    calls = _CallForms(format_, tools, tokenizer, r'("\n" | "\n\n")? ' if is_open else "")
    if tools.is_demanded:
        form = calls.demanded(request)
    elif tools.callable and request.structured_outputs is None and format_.tool_calls is not None:
        if form is not None:
            form = calls.or_json(form)
        elif tools.is_bound:
            form = calls.among_text()
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
    """Returns the parameters with the form added. Raises InvalidRequestError for parameters that
    cannot be combined with a form."""
    return params if form is None else replace(params, structured_outputs=form)


@dataclass(frozen=True, slots=True)
class _CallForms:
    """Forms of answers with calls."""

    format: AnswerFormat
    tools: Toolset
    tokenizer: PreTrainedTokenizerBase
    before: str
    """A rule for the line breaks that models write after their reasoning."""

    def demanded(self, request: ChatRequest) -> StructuredOutputs:
        """Returns the form of required calls: one call if a function is named or parallel calls are
        not wanted."""
        choice = request.tool_choice
        name = choice.name or choice.type if isinstance(choice, NamedToolChoice) else str(choice)
        if request.structured_outputs is not None:
            raise InvalidRequestError(
                f"tool_choice={name!r}: it cannot be combined with structured_outputs"
            )
        if self.format.tool_calls is None:
            raise InvalidRequestError(
                f"tool_choice={name!r}: this model's template has no tool calls"
            )
        return _grammar(f"start: {self.before}calls", *self._calls(self._tag))

    def or_json(self, form: StructuredOutputs) -> StructuredOutputs:
        """Returns the form of an answer that is either calls or JSON of this form's schema."""
        assert isinstance(form.json, Mapping), "a response_format is a JSON schema"
        return _grammar(
            f"start: {self.before}(form | calls)",
            f"form: {lark.json_value(form.json, is_strict=True)}",
            *self._calls(self._tag),
        )

    def among_text(self) -> StructuredOutputs:
        """Returns the form of free text in which anything that begins like a call must be a call.
        If the tag of a call is a token, text is everything that does not spell it. Otherwise text
        and tag are one lexeme, which ends with the tag, because a lexer does not go back."""
        form, thinking = self.format.tool_calls, self.format.thinking
        assert form is not None, "calls are kept to a form in models that have calls"
        starts = form.reader(self.tools.callable or ()).starts
        text = f"TEXT: {lark.regex('(?s:.+)')} & {_without(starts)}"
        opened = self._tag(form.open)
        if opened == lark.text(form.open):
            opening = f"opening[suffix={opened}]: {lark.regex('(?s:.*)')}"
            others = [start for start in starts if start != form.open]
            opening += f" & {_without(others)}" if others else ""
            calls = self._calls(lambda tag: "opening" if tag == form.open else self._tag(tag))
            return _grammar("start: calls* text", "text: TEXT?", opening, text, *calls)
        tags = () if thinking is None else (thinking.open, thinking.close)
        marks = [mark for mark in map(self._tag, tags) if not mark.startswith('"')]
        rule = f"text: ({' | '.join(['TEXT', *marks])})*"
        return _grammar("start: text (calls text)*", rule, text, *self._calls(self._tag))

    def _calls(self, tag: lark.Tag) -> Sequence[str]:
        """Returns rules that define `calls`."""
        assert self.format.tool_calls is not None
        tools, is_single = self.tools.callable or (), self.tools.is_single
        try:
            return self.format.tool_calls.grammar(tools, tag, is_single=is_single)
        except RecursionError as error:
            raise InvalidRequestError("tools: the parameters are nested too deeply") from error

    def _tag(self, tag: str) -> str:
        """Returns a tag for a grammar: as a token if it is one."""
        ids = self.tokenizer.encode(tag, add_special_tokens=False)
        return tag if len(ids) == 1 else lark.text(tag)


def _grammar(*rules: str) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join(rules))


def _without(tags: Sequence[str]) -> str:
    """Returns a regex of the texts that contain none of these tags."""
    found = "|".join(re.escape(tag) for tag in tags)
    return f"~{lark.regex(f'(?s:.*)(?:{found})(?s:.*)')}"


def _end_of_reasoning(format_: AnswerFormat, tokenizer: PreTrainedTokenizerBase, field: str) -> int:
    assert format_.thinking is not None, "what is open has a format"
    ids: list[int] = tokenizer.encode(format_.thinking.close, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequestError(
            f"{field}: this model's reasoning does not end with one token: switch the "
            "reasoning off with chat_template_kwargs"
        )
    return ids[0]
