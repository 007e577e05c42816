"""The form that an answer must match: from response_format, or from a tool choice that requires a
call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams, StructuredOutputs
from milepost.server.parsing import lark
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parsing.formats import ToolCalls
from milepost.server.parts import NamedToolChoice, ResponseFormat
from milepost.server.protocol import ChatRequest, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def of_request(request: Sampling) -> StructuredOutputs | None:
    """From `response_format` or `structured_outputs`. Raises InvalidRequestError for both."""
    form, wanted = of_response_format(request.response_format), request.structured_outputs
    if wanted is None:
        return form
    if form is not None:
        raise InvalidRequestError(
            "structured_outputs={...}: response_format is set too, use one of them"
        )
    schema = {"type": "object"} if wanted.json_object else wanted.json_
    return StructuredOutputs(
        json=schema, regex=wanted.regex, choice=wanted.choice, grammar=wanted.grammar
    )


def of_response_format(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    """None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return StructuredOutputs(json={"type": "object"})
    return StructuredOutputs(json=wanted.json_schema.schema_)


def of_chat(
    request: ChatRequest,
    tools: lark.Tools | None,
    format_: AnswerFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_open: bool,
) -> StructuredOutputs | None:
    """With `is_open` the form begins behind the reasoning. Raises InvalidRequestError."""
    form = of_request(request)
    demanded = _demanded(request, tools)
    if demanded:
        if form is not None:
            raise InvalidRequestError(
                f"tool_choice={_name(request)!r}: it cannot be combined with response_format"
            )
        form = _calls_form(request, demanded, format_.tool_calls, tokenizer, is_open=is_open)
    if form is not None and is_open:
        form = replace(form, starts_after=_end_of_reasoning(format_, tokenizer))
    return form


def field_of(request: Sampling) -> str:
    """The field that asks for the form."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    return "response_format" if request.response_format is not None else "tool_choice"


def apply(params: SamplingParams, form: StructuredOutputs | None) -> SamplingParams:
    """Raises InvalidRequestError for parameters that no form can be combined with."""
    return params if form is None else replace(params, structured_outputs=form)


def _name(request: ChatRequest) -> str:
    choice = request.tool_choice
    return choice.function.name if isinstance(choice, NamedToolChoice) else str(choice)


def _demanded(request: ChatRequest, tools: lark.Tools | None) -> lark.Tools:
    """The tools of which one must be called."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return [t for t in tools or () if t["function"]["name"] == choice.function.name]
    return list(tools or ()) if choice == "required" else []


def _calls_form(
    request: ChatRequest,
    tools: lark.Tools,
    calls: ToolCalls | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_open: bool,
) -> StructuredOutputs:
    """One call where a function is named, or calls in parallel are not wanted."""
    if calls is None:
        name = _name(request)
        raise InvalidRequestError(f"tool_choice={name!r}: this model's template has no tool calls")
    is_single = not (request.tool_choice == "required" and request.parallel_tool_calls is not False)
    try:
        rules = calls.grammar(tools, lambda tag: _tag(tokenizer, tag), is_single=is_single)
    except RecursionError as error:
        raise InvalidRequestError("tools: the parameters are nested too deeply") from error
    before = r'("\n" | "\n\n")? ' if is_open else ""  # as models write it behind their reasoning
    return StructuredOutputs(grammar="\n".join([f"start: {before}calls", *rules]))


def _tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """A tag in a grammar: as a token where it is one."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return tag if len(ids) == 1 else lark.text(tag)


def _end_of_reasoning(format_: AnswerFormat, tokenizer: PreTrainedTokenizerBase) -> int:
    assert format_.thinking is not None, "what is open has a format"
    ids = tokenizer.encode(format_.thinking.close, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequestError(
            "response_format: this model's reasoning has no end that is one token; switch the "
            "reasoning off with chat_template_kwargs"
        )
    return ids[0]
