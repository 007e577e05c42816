"""Messages and tools of a request in the form that chat templates read, and which tools may be
called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.server.parsing import lark
from milepost.server.parts import FramesPart, ImagePart, Message, TextPart, VideoPart
from milepost.server.protocol import ChatRequest
from milepost.server.tools import INPUT, NamedToolChoice, Tool, ToolCall, as_function

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
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Returns the content. A refusal counts as the assistant's text."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or ""
    return [_part(part) for part in message.content]


def _part(part: TextPart | ImagePart | VideoPart | FramesPart) -> dict[str, Any]:
    if isinstance(part, ImagePart | VideoPart | FramesPart):
        plain = part.plain
    else:
        plain = {"type": "text", "text": part.text if part.type == "text" else part.refusal}
    if part.is_marked:
        plain["cache_control"] = {"type": "ephemeral"}
    return plain


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
        names = [choice.name] if allowed is None else [tool.name for tool in allowed.tools]
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
