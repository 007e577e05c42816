"""The form that an answer must keep to: from response_format, or from a tool choice that demands a
call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from milepost.engine.guidance import JSON_OPTIONS
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams, StructuredOutputs
from milepost.server.parsing.calls import CLOSE, OPEN
from milepost.server.protocol import ChatRequest, NamedToolChoice, ResponseFormat, Sampling

Tools = Sequence[Mapping[str, Any]]

END_OF_REASONING = "</think>"


def of_request(request: Sampling) -> StructuredOutputs | None:
    """From `response_format` or `structured_outputs`. Raises InvalidRequestError for both."""
    form, wanted = of_response_format(request.response_format), request.structured_outputs
    if wanted is None:
        return form
    if form is not None:
        raise InvalidRequestError("structured_outputs={...}: not with response_format")
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
    tools: Tools | None,
    calls: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_open: bool,
) -> StructuredOutputs | None:
    """`calls` is the model's form of tool calls; with `is_open` the form begins behind the
    reasoning. Raises InvalidRequestError."""
    form = of_request(request)
    demanded = _demanded(request, tools)
    if demanded:
        if form is not None:
            raise InvalidRequestError(f"tool_choice={_name(request)!r}: not with response_format")
        form = _calls_form(demanded, calls, tokenizer, _name(request))
    if form is not None and is_open:
        form = replace(form, starts_after=_end_of_reasoning(tokenizer))
    return form


def apply(params: SamplingParams, form: StructuredOutputs | None) -> SamplingParams:
    """Raises InvalidRequestError for parameters that no form can be combined with."""
    return params if form is None else replace(params, structured_outputs=form)


def _name(request: ChatRequest) -> str:
    choice = request.tool_choice
    return choice.function.name if isinstance(choice, NamedToolChoice) else str(choice)


def _demanded(request: ChatRequest, tools: Tools | None) -> Tools:
    """The tools of which one must be called."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        return [t for t in tools or () if t["function"]["name"] == choice.function.name]
    return list(tools or ()) if choice == "required" else []


def _end_of_reasoning(tokenizer: PreTrainedTokenizerBase) -> int:
    ids = tokenizer.encode(END_OF_REASONING, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequestError(
            "response_format: this model's reasoning has no end that is one token; switch the "
            "reasoning off with chat_template_kwargs"
        )
    return ids[0]


# --- calls ----------------------------------------------------------------------------------------


def _calls_form(
    tools: Tools, calls: str, tokenizer: PreTrainedTokenizerBase, name: str
) -> StructuredOutputs:
    if calls == "none":
        raise InvalidRequestError(f"tool_choice={name!r}: this model's template has no tool calls")
    rules = [f"start: {_tag(tokenizer, OPEN)} body {_tag(tokenizer, CLOSE)}"]
    rules += _hermes_rules(tools) if calls == "hermes" else _xml_rules(tools)
    return StructuredOutputs(grammar="\n".join(rules))


def _tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """A tag in a grammar: as a token where it is one."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return tag if len(ids) == 1 else json.dumps(tag)


def _hermes_rules(tools: Tools) -> list[str]:
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": _parameters(tool),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return [f'body: "\\n" {_json({"anyOf": forms})} "\\n"']


def _json(schema: Mapping[str, Any]) -> str:
    """A JSON value of this schema, in a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _xml_rules(tools: Tools) -> list[str]:
    names = [f"tool{i}" for i in range(len(tools))]
    rules = [f'body: "\\n" ({" | ".join(names)}) "\\n"']
    for rule, tool in zip(names, tools, strict=True):
        rules += _xml_function(rule, tool)
    return rules


def _xml_function(rule: str, tool: Mapping[str, Any]) -> list[str]:
    """Parameters in the order of the schema; those that are not required may be left out."""
    parameters = _parameters(tool)
    required = parameters.get("required") or []
    parts, rules = [], []
    for number, (key, schema) in enumerate((parameters.get("properties") or {}).items()):
        own = f"{rule}_p{number}"
        parts.append(own if key in required else f"{own}?")
        head = json.dumps(f"<parameter={key}>\n")
        if isinstance(schema, Mapping) and schema.get("type") not in (None, "string"):
            rules.append(f'{own}: {head} {_json(schema)} "\\n</parameter>\\n"')
        else:
            rules.append(f'{own}: {head} {own}_text "\\n"')
            rules.append(f'{own}_text[suffix="</parameter>"]: /(.|\\n)*/')
    head = json.dumps(f"<function={tool['function']['name']}>\n")
    return [f'{rule}: {head} {" ".join(parts)} "</function>"', *rules]


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool["function"].get("parameters") or {"type": "object"}
