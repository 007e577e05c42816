"""Messages and tools of a request in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from milepost.server.errors import HttpError
from milepost.server.parts import Message, TextPart, Tool, ToolCall

_NOT_FOR_TEMPLATES = {"content", "tool_calls", "reasoning", "refusal", "annotations"}


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises HttpError 400 for a call whose arguments are no JSON object."""
    return [_message(index, message) for index, message in enumerate(messages)]


def tools_for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """None for no tools, so that templates that ask `if tools` agree with those that count."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def _message(index: int, message: Message) -> dict[str, Any]:
    """Templates know no role `developer`: it is the system's."""
    plain = message.model_dump(exclude_none=True, exclude=_NOT_FOR_TEMPLATES)
    plain["content"] = _content(message)
    if message.role == "developer":
        plain["role"] = "system"
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        where = f"messages[{index}].tool_calls"
        plain["tool_calls"] = [
            _call(f"{where}[{place}]", call) for place, call in enumerate(message.tool_calls)
        ]
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


def _call(where: str, call: ToolCall) -> dict[str, Any]:
    """Arguments become an object: templates write it in the model's own way."""
    arguments: Any = call.function.arguments or "{}"
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)  # as deep as a body may be
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        field = f"{where}.function.arguments"
        raise HttpError(400, f"{field}: use the text of a JSON object", param=field)
    plain = call.model_dump(exclude_none=True, exclude={"index"})
    plain["function"]["arguments"] = arguments
    return plain
