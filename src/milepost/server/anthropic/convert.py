"""Converts Anthropic's requests to chat requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from milepost.server import parts as openai
from milepost.server import tools
from milepost.server.anthropic.blocks import (
    CallBlock,
    CompactionBlock,
    ContentBlock,
    ImageBlock,
    ResultBlock,
    ServerResultBlock,
    TextBlock,
    ThinkingBlock,
)
from milepost.server.anthropic.protocol import (
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
)
from milepost.server.protocol import ChatRequest

Result = ResultBlock | ServerResultBlock

_BILLING = "x-anthropic-billing-header:"
"""A line that coding agents put before the system prompt. It differs in every request, so nothing
after it could be reused, and models need not see it."""


_SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
"""Fields that a chat request has under the same name."""


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Returns the conversation as a chat request; raises ValueError (pydantic's) if that is
    impossible.

    An assistant's message at the end is the beginning of the answer.
    """
    messages = _system(request)
    for message in _summarised(request.messages):
        messages += _messages(message)
    goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
    sampling: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        sampling = {name: getattr(request, name) for name in _SAME}
        sampling |= {"stop": request.stop_sequences or None, "user": _user(request)}
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=_tools(request),
        continue_final_message=goes_on or None,
        **_tool_choice(request),
        **_output(request),
        **sampling,
    )


def has_breakpoints(request: CountTokensRequest) -> bool:
    """Returns whether the request has a `cache_control`."""
    blocks = [b for m in request.messages if isinstance(m.content, list) for b in m.content]
    system = request.system if isinstance(request.system, list) else []
    places = [request, *blocks, *system, *(request.tools or ())]
    return any(place.cache_control is not None for place in places)


def _user(request: MessagesRequest) -> str | None:
    user = (request.metadata or {}).get("user_id")
    return user[:1024] if isinstance(user, str) else None


def _system(request: CountTokensRequest) -> list[openai.Message]:
    given = request.system or []
    if isinstance(given, str):
        given = [TextBlock(type="text", text=given)]
    parts = _parts([block for block in given if not block.text.startswith(_BILLING)])
    return [openai.Message(role="system", content=parts)] if parts else []


def _summarised(messages: Sequence[AnthropicMessage]) -> list[AnthropicMessage]:
    """Returns the messages from the last summary on, which is a user's message of its own."""
    found: list[AnthropicMessage] = []
    for message in reversed(messages):
        content = message.content if isinstance(message.content, list) else []
        for place in reversed(range(len(content))):
            block = content[place]
            if isinstance(block, CompactionBlock) and block.content:
                text = TextBlock(type="text", text=block.content, cache_control=block.cache_control)
                summary = AnthropicMessage(role="user", content=[text])
                rest = message.model_copy(update={"content": content[place + 1 :]})
                return [summary, *([rest] if rest.content else []), *reversed(found)]
        found.append(message)
    return [*messages]


def _messages(message: AnthropicMessage) -> list[openai.Message]:
    """Returns a message as chat messages. Tool results become messages of their own, before the
    user's text beside them."""
    if isinstance(message.content, str):
        return [openai.Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return _assistant(message.content)
    results = [_result(block) for block in message.content if isinstance(block, Result)]
    parts = _parts(message.content)
    rest = [openai.Message(role=message.role, content=parts)] if parts else []
    return [*results, *rest] or [openai.Message(role=message.role, content="")]


def _assistant(content: Sequence[ContentBlock]) -> list[openai.Message]:
    """Returns an assistant's message, divided at the results of tools that another server ran."""
    messages: list[openai.Message] = []
    said: list[ContentBlock] = []
    for block in content:
        if isinstance(block, Result):
            messages += [_said(said), _result(block)] if said else [_result(block)]
            said = []
        else:
            said.append(block)
    return [*messages, _said(said)] if said or not messages else messages


def _said(content: Sequence[ContentBlock]) -> openai.Message:
    calls = [
        tools.ToolCall(
            id=block.id, function=tools.FunctionCall(name=block.name, arguments=block.arguments)
        )
        for block in content
        if isinstance(block, CallBlock)
    ]
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    marks = [block.cache_control for block in content if block.cache_control]
    return openai.Message(
        role="assistant",
        content=_parts(content) or None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
        cache_control=marks[-1] if marks and calls else None,
    )


def _parts(content: Sequence[Any]) -> list[openai.TextPart | openai.ImagePart]:
    """Returns the parts that the model sees; the chat template decides how they are joined."""
    return [
        openai.ImagePart(type="image_url", image_url=block.url, cache_control=block.cache_control)
        if isinstance(block, ImageBlock)
        else openai.TextPart(type="text", text=block.plain, cache_control=block.cache_control)
        for block in content
        if isinstance(block, ImageBlock) or hasattr(block, "plain")
    ]


def _result(block: Result) -> openai.Message:
    content: Any = block.content or ""
    if isinstance(block, ServerResultBlock):
        content = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    elif not isinstance(content, str):
        content = _parts(content)
    return openai.Message(
        role="tool",
        tool_call_id=block.tool_use_id,
        content=content,
        cache_control=block.cache_control,
    )


def _tools(request: CountTokensRequest) -> list[tools.Tool] | None:
    return [
        tools.Tool(
            type="function",
            function=tools.FunctionDefinition(
                name=tool.name or "",
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            ),
        )
        for tool in request.tools or ()
        if tool.is_custom
    ] or None


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    kind: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if kind is None:
        name = tools.FunctionName(name=choice.name or "")
        kind = tools.NamedToolChoice(type="function", function=name)
    is_single = choice.disable_parallel_tool_use
    return {"tool_choice": kind, "parallel_tool_calls": False if is_single else None}


def _output(request: CountTokensRequest) -> dict[str, Any]:
    """Returns effort and form; disabled thinking is effort `none`."""
    found: dict[str, Any] = {}
    config = request.output_config
    if request.thinking is not None and request.thinking.type == "disabled":
        found["reasoning_effort"] = "none"
    elif config is not None and config.effort is not None:
        found["reasoning_effort"] = config.effort
    if request.thinking is not None and request.thinking.display == "omitted":
        found["include_reasoning"] = False
    form = request.output_format if config is None or config.format is None else config.format
    if form is not None:
        schema = openai.JsonSchema(schema=form.schema_)
        found["response_format"] = openai.ResponseFormat(type="json_schema", json_schema=schema)
    return found
