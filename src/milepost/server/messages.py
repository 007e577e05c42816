"""Messages and tools of a request in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost.server import custom
from milepost.server.parts import Message, TextPart
from milepost.server.tools import Tool, ToolCall

_NOT_FOR_TEMPLATES = {"content", "tool_calls", "reasoning", "refusal", "annotations"}


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def tools_for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Those that can be called, as functions. None for no tools, so that templates that ask
    `if tools` agree with those that count."""
    return [_tool(tool) for tool in tools or () if tool.definition is not None] or None


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.custom is not None and tool.type == "custom":
        return custom.as_function(tool.custom)
    return tool.model_dump(exclude_none=True, exclude={"custom"})


def _message(message: Message) -> dict[str, Any]:
    """Templates know no role `developer`: it is the system's."""
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
    """A refusal is what the assistant said."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or ""
    return [_part(part) for part in message.content]


def _part(part: TextPart) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "type": "text",
        "text": part.text if part.type == "text" else part.refusal,
    }
    if part.cache_control is not None:
        plain["cache_control"] = {"type": part.cache_control.type}
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    """Arguments are an object: templates write it in the model's own way."""
    plain: dict[str, Any] = {"type": "function"} if call.id is None else {"id": call.id}
    plain["type"] = "function"
    if call.custom is not None and call.type == "custom":
        given = {custom.FIELD: call.custom.input or ""}
        return {**plain, "function": {"name": call.custom.name, "arguments": given}}
    assert call.function is not None, "a call of a function has one"
    return {**plain, "function": call.function.model_dump()}
