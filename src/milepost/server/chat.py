"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.processes import Delta
from milepost.server import logprobs
from milepost.server.answers import AnswerParser
from milepost.server.conversation import ChatTurn, begin, response_id
from milepost.server.generation import ChoicesWriter
from milepost.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from milepost.server.protocol import ChatRequest
from milepost.server.service import Service
from milepost.server.stream import send


async def chat(service: Service, request: ChatRequest, http: Request) -> Response:
    """Answers a conversation."""
    model = service.check_model(request.model)
    turn = await begin(service, request, http, field="messages")
    writer = _ChatWriter(service, turn, response_id("chatcmpl", request, http), model)
    return await send(writer, http, turn.generation.close, is_stream=turn.request.stream)


@dataclass(slots=True)
class ChoiceWriter:
    """One choice, as far as it has arrived."""

    events: AnswerParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    """Each call, with the pieces of its arguments."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _is_behind_call: bool = False

    def feed(self, delta: Delta) -> list[dict[str, Any]]:
        """Adds what the engine sent, and returns the pieces for a stream."""
        self.token_ids += delta.token_ids
        gains = [self._take(found) for found in self.events.feed(delta)]
        if delta.finish_reason is not None:
            self.finish_reason = self._finish_reason(delta.finish_reason)
            self.stop_reason = delta.stop_reason
        return gains

    def _take(self, found: Event) -> dict[str, Any]:
        match found:
            case Reasoning(text):
                self.reasoning.append(text)
                return _reasoning(text)
            case Content(text):
                if self.content and self._is_behind_call:
                    text = "\n" + text  # the calls' own text is not part of the content
                self._is_behind_call = False
                self.content.append(text)
                return {"content": text}
            case CallStart(name, own):
                self._is_behind_call = True
                id_ = own or f"call_{uuid.uuid4().hex[:24]}"
                kind, key = self._kind(name)
                call: dict[str, Any] = {"id": id_, "type": kind, kind: {"name": name, key: ""}}
                self.calls.append((call, []))
                return self._call_gain(call)
            case CallArguments(text):
                call, pieces = self.calls[-1]
                kind, key = self._kind(call[call["type"]]["name"])
                pieces.append(text)
                return self._call_gain({kind: {key: text}})

    def _kind(self, name: str) -> tuple[str, str]:
        """Returns the kind of a tool, and the name of its calls' arguments."""
        is_custom = name in self.events.customs
        return ("custom", "input") if is_custom else ("function", "arguments")

    def _call_gain(self, gain: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": len(self.calls) - 1, **gain}]}

    def _finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """Returns the whole message. Content is null if there are only calls or reasoning."""
        is_empty = not self.content and (self.calls or self.reasoning)
        content = None if is_empty else "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message |= _reasoning("".join(self.reasoning))
        if self.calls:
            message["tool_calls"] = [self._whole(*call) for call in self.calls]
        return message

    def _whole(self, call: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
        kind, key = self._kind(call[call["type"]]["name"])
        return {**call, kind: {**call[kind], key: "".join(pieces)}}


def _reasoning(text: str) -> dict[str, str]:
    """Returns the reasoning under vLLM's name since 0.12, and under the older name that others
    use."""
    return {"reasoning": text, "reasoning_content": text}


class _ChatWriter(ChoicesWriter):
    """Writes the response."""

    event_object = "chat.completion.chunk"

    def __init__(self, service: Service, turn: ChatTurn, id_: str, model: str) -> None:
        super().__init__(service, turn.request, turn.generation, id_, model)
        self._request = turn.request
        self._turn = turn
        self._answers = [ChoiceWriter(events) for events in turn.answers]

    def _usage(self) -> dict[str, Any]:
        return self._turn.usage()

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if self._turn.octets is None:
            return []
        if self._request.return_tokens_as_token_ids:
            delta = logprobs.by_id(delta)
        return logprobs.chat_content(delta, self._request.top_logprobs or 0, self._turn.octets)

    # --- at once ----------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        async for deltas in self._generation.deltas():
            for index, delta in deltas:
                answer = self._answers[index]
                answer.feed(delta)
                answer.logprobs += self._logprobs(delta)
        body = self._head("chat.completion")
        body["choices"] = [self._choice(index) for index in range(len(self._answers))]
        body["usage"] = self._usage()
        body |= self._generation.transfer()
        if self._request.prompt_logprobs is not None:
            scores = await logprobs.scores_of(self._service, self._generation, 0)
            body["prompt_logprobs"] = logprobs.of_prompt(scores, self._request.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._turn.prompt.token_ids
        return body

    def _choice(self, index: int) -> dict[str, Any]:
        answer = self._answers[index]
        content = {"content": answer.logprobs, "refusal": None}
        choice = {
            "index": index,
            "message": answer.message(),
            "logprobs": content if self._request.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    # --- streamed ---------------------------------------------------------------------------------

    def _choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the choices to send for a delta. The first has its logprobs, the last the finish
        reason."""
        answer = self._answers[index]
        gains = answer.feed(delta)
        logprobs = self._logprobs(delta)
        if index not in self._begun:
            self._begun.add(index)
            gains.insert(0, {"role": "assistant", "content": ""})
        if not gains and (logprobs or answer.finish_reason or self._request.return_token_ids):
            gains.append({})
        choices = [_chunk(index, gain) for gain in gains]
        if logprobs and choices:
            choices[0]["logprobs"] = {"content": logprobs, "refusal": None}
        if self._request.return_token_ids and choices:
            choices[0]["token_ids"] = delta.token_ids
        if answer.finish_reason is not None:
            choices[-1]["finish_reason"] = answer.finish_reason
            choices[-1]["stop_reason"] = answer.stop_reason
        return choices


def _chunk(index: int, gain: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": gain, "logprobs": None, "finish_reason": None}
