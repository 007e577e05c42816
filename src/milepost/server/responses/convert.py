"""Converts items of the Responses API to messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milepost.server import parts as openai
from milepost.server import tools as chat_tools
from milepost.server.protocol import ChatRequest
from milepost.server.responses import protocol as kinds
from milepost.server.responses.protocol import (
    LOGPROBS,
    ContentPart,
    InputImage,
    ResponseItem,
    ResponsesRequest,
)
from milepost.server.responses.tools import Names, ResponseTool, choice_for_chat, for_chat

_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "cache_salt",
    "chat_template_kwargs", "mm_processor_kwargs", "priority",
)  # fmt: skip
"""Fields that a chat request has under the same name."""


_SUMMARIES = ("compaction", "compaction_summary", "context_compaction")
"""Types of summaries that only the server which made them can read. The model is told that one is
missing, so that the user learns of it."""
_MISSING = (
    "[Note: a summary of the conversation before this point is missing here, because another "
    "server encrypted it. Tell the user if it is needed.]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A request as a chat request, and the names of its tools."""

    chat: ChatRequest
    names: Names


def to_chat(request: ResponsesRequest, items: Sequence[ResponseItem]) -> Converted:
    """Returns the conversation of `items` with the rest of the request.

    Raises ValueError (pydantic's) if no chat request can express it.
    """
    sampling: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    if has_logprobs(request):
        sampling |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    effort = request.reasoning.effort if request.reasoning is not None else None
    tools: list[ResponseTool] = list(request.tools or ())
    for item in items:
        tools += item.tools if isinstance(item, kinds.MoreToolsItem) else ()
    names = Names(tools)
    chat = ChatRequest(
        messages=messages_of(request.instructions, items, names),
        max_tokens=request.max_output_tokens,
        tools=for_chat(tools) or None,
        tool_choice=choice_for_chat(request.tool_choice, names),
        response_format=_form(request),
        reasoning_effort=effort,
        kv_transfer_params=request.kv_transfer_params,
        **sampling,
    )
    return Converted(chat=chat, names=names)


def has_logprobs(request: ResponsesRequest) -> bool:
    return LOGPROBS in (request.include or ())


def items_of(given: str | Sequence[ResponseItem]) -> list[ResponseItem]:
    """Returns the items of an input; a text is a user's message."""
    if isinstance(given, str):
        return [kinds.MessageItem(role="user", content=given)]
    return list(given)


def messages_of(
    instructions: str | None, items: Sequence[ResponseItem], names: Names
) -> list[openai.Message]:
    """Returns the messages. Reasoning, text and calls of one turn are one message of the
    assistant."""
    messages: list[openai.Message] = []
    if instructions:
        messages.append(openai.Message(role="system", content=instructions))
    turn = _Turn(names)
    for item in items:
        is_other = isinstance(item, kinds.OtherItem) and item.type not in _SUMMARIES
        if is_other or isinstance(item, kinds.MoreToolsItem):
            continue
        if not turn.takes(item):
            messages += turn.close()
        if not turn.add(item):
            messages += [*turn.close(), _plain(item)]
    return [*messages, *turn.close()]


class _Turn:
    """Collects the assistant's message, item by item."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._is_open = False
        self._clear()

    def _clear(self) -> None:
        self._is_open = False
        self._thoughts: list[str] = []
        self._parts: list[openai.TextPart | openai.ImagePart] = []
        self._calls: list[chat_tools.ToolCall] = []

    def takes(self, item: ResponseItem) -> bool:
        """Returns whether an item continues the message: only calls follow a call."""
        if isinstance(item, kinds.CallItem | kinds.CustomCallItem | kinds.BuiltInCallItem):
            return True
        return not self._calls and (
            isinstance(item, kinds.ReasoningItem)
            or (isinstance(item, kinds.MessageItem) and item.role == "assistant")
        )

    def add(self, item: ResponseItem) -> bool:
        """Adds an item of the assistant's. Returns False if the item needs a message of its own."""
        match item:
            case kinds.ReasoningItem():
                parts = item.content or item.summary or ()
                self._thoughts.append("\n".join(_text(part) for part in parts))
            case kinds.MessageItem(role="assistant"):
                self._parts += _parts(item.content)
            case kinds.CallItem():
                name = self._names.of_client(item.name, item.namespace)
                self._call(item.call_id, name, item.arguments)
            case kinds.CustomCallItem():
                name = self._names.of_client(item.name, item.namespace)
                custom = chat_tools.CustomCall(name=name, input=item.input)
                call = chat_tools.ToolCall(id=item.call_id, type="custom", custom=custom)
                self._calls.append(call)
            case kinds.BuiltInCallItem():
                self._call(item.call_id or item.id, item.name, item.given)
            case kinds.McpCallItem():
                self._call(item.id, item.name, item.arguments)
                self._is_open = True
                return False  # its result follows
            case _:
                return False
        self._is_open = True
        return True

    def _call(self, id_: str | None, name: str, arguments: Any) -> None:
        function = chat_tools.FunctionCall(name=name, arguments=arguments)
        self._calls.append(chat_tools.ToolCall(id=id_, function=function))

    def close(self) -> list[openai.Message]:
        if not self._is_open:
            return []
        message = openai.Message(
            role="assistant",
            content=_content(self._parts) if self._parts else None,
            reasoning_content="".join(self._thoughts) or None,
            tool_calls=self._calls or None,
        )
        self._clear()
        return [message]


def _plain(item: ResponseItem) -> openai.Message:
    """Returns an item that is not the assistant's as a message."""
    if isinstance(item, kinds.OtherItem):
        return openai.Message(role="user", content=_MISSING)
    if isinstance(item, kinds.MessageItem):
        return openai.Message(role=item.role, content=_content(_parts(item.content)))
    id_ = getattr(item, "call_id", None) or item.id
    return openai.Message(role="tool", tool_call_id=id_, content=_output(item))


def _output(item: ResponseItem) -> str | list[Any]:
    match item:
        case kinds.OutputItem():
            return _content(_parts(item.output))
        case kinds.ShellOutputItem():
            return json.dumps(item.output, ensure_ascii=False)
        case kinds.ToolSearchOutputItem():
            return json.dumps(item.tools, ensure_ascii=False)
        case kinds.McpCallItem():
            return item.output or (json.dumps(item.error) if item.error is not None else "")
    raise AssertionError(f"an item of type {item.type} has no output")


def _parts(content: str | Sequence[Any] | None) -> list[openai.TextPart | openai.ImagePart]:
    if content is None or isinstance(content, str):
        return [openai.TextPart(type="text", text=content or "")]
    parts: Sequence[Any] = content
    return [_part(part) for part in parts]


def _part(part: ContentPart | InputImage) -> openai.TextPart | openai.ImagePart:
    marks: dict[str, Any] = {
        "cache_control": part.cache_control,
        "prompt_cache_breakpoint": part.prompt_cache_breakpoint,
    }
    if isinstance(part, InputImage):
        return openai.ImagePart(
            type="input_image", image_url=part.image_url or "", detail=part.detail, **marks
        )
    return openai.TextPart(type="text", text=_text(part), **marks)


def _content(parts: list[openai.TextPart | openai.ImagePart]) -> str | list[Any]:
    """Returns the content: a text, unless the chat template must see several parts, an image or a
    mark."""
    texts = [part.text or "" for part in parts if isinstance(part, openai.TextPart)]
    is_text = len(parts) == len(texts) < 2 and not any(part.is_marked for part in parts)
    return "".join(texts) if is_text else parts


def _text(part: ContentPart) -> str:
    return part.text if part.text is not None else part.refusal or ""


def _form(request: ResponsesRequest) -> openai.ResponseFormat | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return openai.ResponseFormat(type=wanted.type)
    schema = openai.JsonSchema(name=wanted.name, schema=wanted.schema_ or {}, strict=wanted.strict)
    return openai.ResponseFormat(type="json_schema", json_schema=schema)
