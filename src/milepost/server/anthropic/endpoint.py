"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from milepost.server import conversation
from milepost.server.answers import AnswerBlock, BlockAnswer, Step, read_whole
from milepost.server.anthropic.convert import has_breakpoints, to_chat
from milepost.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from milepost.server.bodies import BODY_SIZE, size_of
from milepost.server.conversation import ChatTurn
from milepost.server.errors import HttpError, anthropic_body_of, json_response
from milepost.server.protocol import ChatRequest
from milepost.server.service import Service
from milepost.server.stream import named_event, send

ANTHROPIC_VERSION = "anthropic-version"
"""A header of all requests of this API."""
SIGNATURE = "milepost"
"""Signature of thinking blocks, which must have one; it is ignored when it comes back."""

_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "call": {"type": "tool_use", "input": {}},
}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


async def answer(service: Service, request: MessagesRequest, http: Request) -> Response:
    """Answers a conversation."""
    model = service.check_model(request.model)
    chat = await _chat(service, request, http)
    turn = await conversation.begin(service, chat, http, field="messages", fits_max_tokens=True)
    writer = _MessageWriter(turn, model, request)
    close, is_stream = turn.generation.close, request.stream
    return await send(writer, http, close, is_stream=is_stream, failed=_failed)


async def count_tokens(service: Service, request: CountTokensRequest, http: Request) -> Response:
    """Returns the length of the prompt."""
    service.check_model(request.model)
    chat = await _chat(service, request, http)
    return json_response({"input_tokens": await conversation.count(service, chat, http)})


def models(service: Service) -> dict[str, Any]:
    """Returns the served models in Anthropic's form, for requests with its header."""
    data = [model(service, name) for name in service.names]
    ends = {"first_id": service.names[0], "last_id": service.names[-1]}
    return {"data": data, "has_more": False, **ends}


def model(service: Service, name: str) -> dict[str, Any]:
    """Returns one served model."""
    since = datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    named = {"type": "model", "id": name, "display_name": name}
    return {**named, "created_at": since, "lifecycle": "active"}


async def _chat(service: Service, request: CountTokensRequest, http: Request) -> ChatRequest:
    """Returns the chat request. Raises HttpError 400 if there is none."""
    size = size_of(request.messages) + http.scope[BODY_SIZE]
    try:
        chat = await service.large.run(lambda: to_chat(request), size)
    except ValidationError as error:
        raise HttpError(400, error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    thinking = request.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        if thinking.type == "enabled" and service.counts_thinking:
            chat.thinking_token_budget = thinking.budget_tokens
        else:
            service.unknown.tell(["thinking.budget_tokens"], http.scope)
    if thinking is not None and thinking.type != "disabled" and chat.reasoning_effort is None:
        chat.chat_template_kwargs = service.switched_on("enable_thinking")
    return chat


def _failed(error: Exception) -> bytes:
    return named_event("error", anthropic_body_of(error))


class _MessageWriter:
    """Writes the response."""

    def __init__(self, turn: ChatTurn, model: str, request: MessagesRequest) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._turn = turn
        self._model = model
        self._stops = request.stop_sequences or ()
        self._has_breakpoints = has_breakpoints(request)
        self._answer = BlockAnswer(turn.answers[0])

    async def whole(self) -> dict[str, Any]:
        await read_whole(self._turn.generation.deltas(), self._answer.feed)
        content = [_whole(block) for block in self._answer.blocks]
        return {**self._message(content), **self._ending(), "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        has_begun = False
        async with aclosing(self._turn.generation.deltas()) as arrived:
            async for deltas in arrived:
                pieces = [] if has_begun else [self._start()]
                has_begun = True
                for _, delta in deltas:
                    pieces += [_event(step) for step in self._answer.feed(delta)]
                yield b"".join(pieces)
            end = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
            yield named_event("message_delta", end)
            yield named_event("message_stop", {"type": "message_stop"})

    def _start(self) -> bytes:
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None}
        body = {"type": "message_start", "message": {**message, "usage": self._usage()}}
        return named_event("message_start", body)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _ending(self) -> dict[str, Any]:
        end = self._answer.last_delta
        stop, reason = end.stop_reason, "end_turn"
        is_sequence = end.finish_reason == "stop" and stop in self._stops
        if end.finish_reason == "length":
            reason = "max_tokens"
        elif is_sequence:
            reason = "stop_sequence"
        elif any(block.kind == "call" for block in self._answer.blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop if is_sequence else None}

    def _usage(self) -> dict[str, int]:
        """Returns the prompt's tokens in three parts: read from the cache, computed up to the last
        breakpoint, and the rest."""
        usage = self._turn.generation.usage()
        read = usage["prompt_tokens_details"]["cached_tokens"]
        kept = max(self._turn.prompt.breakpoints, default=0) if self._has_breakpoints else 0
        created = max(kept - read, 0)
        return {
            "input_tokens": usage["prompt_tokens"] - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": usage["completion_tokens"],
        }


def _named(block: AnswerBlock) -> dict[str, Any]:
    return {"id": block.call_id("toolu"), "name": block.name} if block.kind == "call" else {}


def _whole(block: AnswerBlock) -> dict[str, Any]:
    body = {**_BLOCKS[block.kind], **_named(block)}
    if block.kind == "call":
        body["input"] = _arguments(block.text)
    elif block.kind == "reasoning":
        body |= {"thinking": block.text, "signature": SIGNATURE}
    else:
        body["text"] = block.text
    return body


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call; if it was cut off, those that are complete, as Anthropic's
    client reads the stream."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(step: Step) -> bytes:
    block = step.block
    if step.kind == "opened":
        return _block_event("start", block, content_block={**_BLOCKS[block.kind], **_named(block)})
    if step.kind == "gained":
        name, key = _DELTAS[block.kind]
        return _block_event("delta", block, delta={"type": name, key: step.text})
    signed = b""
    if block.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        signed = _block_event("delta", block, delta=delta)
    return signed + _block_event("stop", block)


def _block_event(what: str, block: AnswerBlock, **fields: Any) -> bytes:
    kind = f"content_block_{what}"
    return named_event(kind, {"type": kind, "index": block.index, **fields})
