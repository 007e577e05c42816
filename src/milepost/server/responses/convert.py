"""Items of the Responses API as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milepost.server import parts as openai
from milepost.server.protocol import ChatRequest
from milepost.server.responses.protocol import ContentPart, InputItem, ResponsesRequest

_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "user",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "cache_salt",
    "chat_template_kwargs",
    "priority",
)
"""Fields that a chat request has under the same name."""


def to_chat(request: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """The conversation that `items` are, with the rest of the request.

    Raises ValueError (pydantic's own) for what no chat request can say.
    """
    own: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    if has_logprobs(request):
        own |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    effort = request.reasoning.effort if request.reasoning is not None else None
    return ChatRequest(
        messages=messages_of(request.instructions, items),
        max_tokens=request.max_output_tokens,
        tools=_tools(request),
        tool_choice=_tool_choice(request),
        response_format=_form(request),
        reasoning_effort=effort,
        kv_transfer_params=request.kv_transfer_params,
        **own,
    )


def has_logprobs(request: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (request.include or ())


def items_of(given: str | Sequence[InputItem]) -> list[InputItem]:
    """A text is what a user says."""
    return [InputItem(role="user", content=given)] if isinstance(given, str) else list(given)


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[openai.Message]:
    """Reasoning, text and calls of one turn make one message of the assistant."""
    messages: list[openai.Message] = []
    if instructions:
        messages.append(openai.Message(role="system", content=instructions))
    turn: dict[str, Any] | None = None
    for item in items:
        if item.type == "function_call_output" or item.role not in (None, "assistant"):
            messages += _closed(turn)
            turn = None
            messages.append(_plain(item))
        else:
            if turn is not None and item.type != "function_call" and "tool_calls" in turn:
                messages += _closed(turn)
                turn = None
            turn = turn or {}
            _extend(turn, item)
    return [*messages, *_closed(turn)]


def _closed(turn: dict[str, Any] | None) -> list[openai.Message]:
    return [] if turn is None else [openai.Message(role="assistant", **turn)]


def _plain(item: InputItem) -> openai.Message:
    if item.type == "function_call_output":
        return openai.Message(role="tool", tool_call_id=item.call_id, content=_text(item.output))
    assert item.role is not None, "an item of type message has a role"
    return openai.Message(role=item.role, content=_text(item.content))


def _extend(turn: dict[str, Any], item: InputItem) -> None:
    """Add an item of the assistant's to its message."""
    if item.type == "reasoning":
        thoughts = _text(item.content or item.summary)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
    elif item.type == "function_call":
        function = openai.FunctionCall(name=item.name or "", arguments=item.arguments)
        turn.setdefault("tool_calls", []).append(
            openai.ToolCall(id=item.call_id, function=function)
        )
    else:
        turn["content"] = turn.get("content", "") + _text(item.content)


def _text(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if part.text is not None else part.refusal or "" for part in content)


def _tools(request: ResponsesRequest) -> list[openai.Tool] | None:
    return [
        openai.Tool(
            type="function",
            function=openai.FunctionDefinition(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in request.tools or ()
    ] or None


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return openai.NamedToolChoice(type="function", function=openai.FunctionName(name=choice.name))


def _form(request: ResponsesRequest) -> openai.ResponseFormat | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return openai.ResponseFormat(type=wanted.type)
    schema = openai.JsonSchema(name=wanted.name, schema=wanted.schema_ or {}, strict=wanted.strict)
    return openai.ResponseFormat(type="json_schema", json_schema=schema)
