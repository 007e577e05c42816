"""Messages, tools and variables of a request in the form that chat templates read, and which tools
may be called. A request that sets a variable which its template does not read is refused."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.compiler import Frame
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser

from milepost.server.errors import HttpError
from milepost.server.parsing import lark
from milepost.server.parts import Message, ThinkingPart
from milepost.server.protocol import ChatRequest
from milepost.server.tools import INPUT, NamedToolChoice, Tool, ToolCall, as_function

MAX_NAME_LEN = 256
"""Number of characters of an unknown variable's name that are compared and repeated."""
_NOT_FOR_TEMPLATES = {"content", "tool_calls", "reasoning", "refusal", "annotations"}


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def tools_for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Returns the callable tools as functions. No tools are None, so that templates that test `if
    tools` agree with those that count."""
    return [_tool(tool) for tool in tools or () if tool.definition is not None] or None


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.custom is not None and tool.type == "custom":
        return as_function(tool.custom)
    return tool.model_dump(exclude_none=True, exclude={"custom"})


def _message(message: Message) -> dict[str, Any]:
    """Returns a message for templates. The role `developer`, which they do not know, becomes
    `system`."""
    plain = message.model_dump(exclude_none=True, exclude=_NOT_FOR_TEMPLATES)
    plain["content"] = _content(message)
    if message.role == "developer":
        plain["role"] = "system"
    reasoning = message.reasoning_content or message.reasoning or _thinking(message)
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Returns the content. A refusal counts as the assistant's text."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or ""
    found = []
    for part in message.content:
        if type(part) is not ThinkingPart:
            plain = part.plain
            if part.is_marked:
                plain["cache_control"] = {"type": "ephemeral"}
            found.append(plain)
    return found


def _thinking(message: Message) -> str | None:
    parts = message.content if isinstance(message.content, list) else []
    return "\n".join(part.said for part in parts if type(part) is ThinkingPart) or None


def _call(call: ToolCall) -> dict[str, Any]:
    """Returns a call with its arguments as an object, which templates write in the model's own
    way."""
    plain: dict[str, Any] = {"type": "function"} if call.id is None else {"id": call.id}
    plain["type"] = "function"
    if call.custom is not None and call.type == "custom":
        given = {INPUT: call.custom.input or ""}
        return {**plain, "function": {"name": call.custom.name, "arguments": given}}
    assert call.function is not None, "a call of a function has one"
    return {**plain, "function": call.function.model_dump()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolset:
    """The tools of a request as functions; None for no tools."""

    shown: Sequence[Mapping[str, Any]] | None
    """Tools in the prompt. Tools that may not be called stay there: they stand before the
    conversation, and without them none of it would be in the cache."""
    callable: Sequence[Mapping[str, Any]] | None
    customs: frozenset[str]
    """Names of the tools whose input is text."""
    is_demanded: bool
    """Whether the answer must be a call."""
    is_single: bool
    """Whether one call at most is allowed."""

    @property
    def is_bound(self) -> bool:
        """Whether calls must match a form although the answer may have none: a strict function's
        arguments match its schema, and only allowed tools are called."""
        tools = self.callable or ()
        is_partial = len(tools) < len(self.shown or ())
        return bool(tools) and (is_partial or any(map(lark.is_strict, tools)))


def toolset_of(request: ChatRequest) -> Toolset:
    tools, choice = tools_for_template(request.tools), request.tool_choice
    callable_, is_demanded = tools, choice == "required"
    is_named = False
    if choice == "none":
        callable_ = None
    elif isinstance(choice, NamedToolChoice):
        allowed = choice.allowed_tools
        is_named = allowed is None
        is_demanded = allowed is None or allowed.mode == "required"
        names = set(choice.names)
        callable_ = [tool for tool in tools or () if tool["function"]["name"] in names]
    return Toolset(
        shown=tools,
        callable=callable_,
        customs=frozenset(
            tool.custom.name for tool in request.tools or () if tool.custom is not None
        ),
        is_demanded=is_demanded,
        is_single=is_named or request.parallel_tool_calls is False,
    )


class _Generation(Extension):
    """The tag that transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(TrackingCodeGenerator):
    """Finds names as Jinja does, but computes nothing: a template's constants may take for ever to
    compute, and nothing could end that here."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802
        self._visit_children(node, frame)

    def visit_EvalContextModifier(self, node: nodes.Node, frame: Frame) -> None:  # noqa: N802
        self._visit_children(node, frame)

    visit_ScopedEvalContextModifier = visit_EvalContextModifier  # noqa: N815

    def _visit_children(self, node: nodes.Node, frame: Frame) -> None:
        for child in node.iter_child_nodes():
            self.visit(child, frame)


def variables_of(template: object) -> frozenset[str] | None:
    """Returns the names that a template may read from outside, or None if they are unknown.

    A name that it sets itself on some paths, and reads, is included. Several templates in one
    mapping are unknown: the request decides which one is used.
    """
    if not isinstance(template, str):
        return None
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    names = _Names(environment)
    names.optimizer = None
    try:
        names.visit(environment.parse(template))
    except (TemplateError, RecursionError):
        return None
    return frozenset(names.undeclared_identifiers)


def check_template_kwargs(kwargs: Mapping[str, Any], variables: Collection[str] | None) -> None:
    """Raises HttpError for variables that requests may not set, or the template does not read.
    False and null are always accepted."""
    for name, value in kwargs.items():
        if name in _not_for_requests():
            raise _refusal(name, "requests cannot set it")
        if variables is not None and name not in variables and value not in (None, False):
            settable = sorted(set(variables) - _not_for_requests())
            near = get_close_matches(name[:MAX_NAME_LEN], settable, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise _refusal(name, f"this model's chat template reads no such variable{hint}")


def with_effort(
    kwargs: Mapping[str, Any], effort: str | None, variables: Collection[str] | None
) -> dict[str, Any]:
    """Returns `kwargs` with `reasoning_effort`, and `enable_thinking` derived from it, if the
    template reads them and the request did not set them."""
    if effort is None or variables is None:
        return dict(kwargs)
    found = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**{name: value for name, value in found.items() if name in variables}, **kwargs}


def _refusal(name: str, why: str) -> HttpError:
    field = f"chat_template_kwargs.{name[:MAX_NAME_LEN]}"
    return HttpError(400, f"{field}: {why}", param=field)


@cache
def _not_for_requests() -> frozenset[str]:
    """Returns the variables that requests may not set: they change how the template is applied, or
    are always passed to it."""
    from transformers import PreTrainedTokenizerBase  # slow, but imported by now

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    named = {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    given = {"messages", "conversations", "bos_token", "eos_token", "raise_exception"}
    return frozenset(named | given)
