"""Writes a response and its events, in the order and form of the official API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json

from milepost.engine.processes import Delta
from milepost.server import errors, logprobs
from milepost.server.answers import AnswerBlock, BlockAnswer, Step, read_whole
from milepost.server.conversation import ChatTurn
from milepost.server.logprobs import TokensOfTexts
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.responses.tools import Names
from milepost.server.stream import named_event

_FORMS = {
    "reasoning": ("rs", "reasoning_text", "text"),
    "text": ("msg", "output_text", "text"),
    "call": ("fc", "function_call_arguments", "arguments"),
    "custom": ("ctc", "custom_tool_call_input", "input"),
}
"""The prefix of each kind of item's ids, the name of its events, and the name of its text there."""


class Writer:
    """Writes one response; `on_end` gets it when it is complete."""

    def __init__(
        self,
        request: ResponsesRequest,
        turn: ChatTurn,
        model: str,
        names: Names,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._request = request
        self._turn = turn
        self._octets = turn.octets
        self._names = names
        self._on_end = on_end
        self._answer = BlockAnswer(turn.answers[0])
        self._tokens = TokensOfTexts()
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        """Log-probabilities of text blocks, by index."""
        self._cut: AnswerBlock | None = None
        """The block that was being written when the answer was cut off."""
        self._num_events = 0
        self._created = int(time.time())
        self._writers = {"opened": self._opened, "gained": self._gained, "closed": self._closed}
        self._head = _echo(request, model)

    async def whole(self) -> dict[str, Any]:
        await read_whole(self._turn.generation.deltas(), self._steps)
        return {**self._ended(), **self._turn.generation.transfer()}

    async def events(self) -> AsyncIterator[bytes]:
        begun = self.body("in_progress")
        yield self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )
        async with aclosing(self._turn.generation.deltas()) as arrived:
            async for deltas in arrived:
                steps = [step for _, delta in deltas for step in self._steps(delta)]
                yield b"".join(event for step in steps for event in self._writers[step.kind](step))
            body = self._ended()
            yield self._event(f"response.{body['status']}", response=body)

    def failed(self, error: Exception) -> bytes:
        """Returns the last event of a response that failed."""
        found = errors.body_of(error)["error"]
        self._cut = self._answer.open
        body = self.body("failed")
        body["error"] = {"code": "server_error", "message": found["message"]}
        return self._event("response.failed", response=body)

    def _steps(self, delta: Delta) -> Iterator[Step]:
        if self._octets is not None:
            num_top = self._request.top_logprobs or 0
            self._tokens.add(logprobs.chat_content(delta, num_top, self._octets))
        for step in self._answer.feed(delta):
            if step.kind == "closed":
                self._end_block(step.block)
            yield step

    def _end_block(self, block: AnswerBlock) -> None:
        """Keeps the log-probabilities of a text, and notes whether the block is cut off."""
        if self._answer.is_cut:
            self._cut = block
        if self._octets is not None:
            claimed = self._tokens.claim(block.text)
            if block.kind == "text":
                self._logprobs[block.index] = claimed or []

    # --- the whole --------------------------------------------------------------------------------

    def _ended(self) -> dict[str, Any]:
        is_cut = self._answer.last_delta.finish_reason == "length"
        body = self.body("incomplete" if is_cut else "completed")
        if is_cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        body["usage"] = self._usage()
        self._on_end(body)
        return body

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            **self._head,
            "output": [self._item(block, is_done=True) for block in self._answer.blocks],
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._turn.answers[0].num_reasoning_tokens
            },
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: AnswerBlock, *, is_done: bool) -> dict[str, Any]:
        status = "in_progress"
        if is_done:
            status = "incomplete" if self._is_cut(block) else "completed"
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind == "call":
            text = block.text if is_done else ""
            tool = self._names.of_call(block.name)
            call = {"call_id": block.call_id("call"), **tool.fields()}
            if tool.is_custom:
                return {**item, "type": "custom_tool_call", **call, "input": text}
            return {**item, "type": "function_call", **call, "arguments": text}
        content = [self._part(block)] if is_done else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _is_cut(self, block: AnswerBlock) -> bool:
        """Returns whether a block is incomplete. A call with all its arguments is complete, even
        without its closing tag."""
        is_function = self._kind(block) == "call"
        return block is self._cut and not (is_function and _is_json(block.text))

    def _kind(self, block: AnswerBlock) -> str:
        is_custom = block.kind == "call" and self._names.of_call(block.name).is_custom
        return "custom" if is_custom else block.kind

    def _id(self, block: AnswerBlock) -> str:
        return f"{_FORMS[self._kind(block)][0]}_{block.id}"

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _part(self, block: AnswerBlock, text: str | None = None) -> dict[str, Any]:
        text = block.text if text is None else text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs.get(block.index, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # --- its events -------------------------------------------------------------------------------

    def _opened(self, step: Step) -> Iterator[bytes]:
        block = step.block
        item = self._item(block, is_done=False)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = self._part(block, "")
            yield self._event("response.content_part.added", **self._place(block), part=part)

    def _gained(self, step: Step) -> Iterator[bytes]:
        block, name = step.block, _FORMS[self._kind(step.block)][1]
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        yield self._event(
            f"response.{name}.delta", **self._place(block), delta=step.text, **logprobs
        )

    def _closed(self, step: Step) -> Iterator[bytes]:
        block, kind = step.block, self._kind(step.block)
        _, name, key = _FORMS[kind]
        fields: dict[str, Any] = {key: block.text}
        if kind == "text":
            fields["logprobs"] = self._logprobs.get(block.index, [])
        elif kind == "call":
            fields["name"] = self._names.of_call(block.name).name
        yield self._event(f"response.{name}.done", **self._place(block), **fields)
        if block.kind != "call":
            part = self._part(block)
            yield self._event("response.content_part.done", **self._place(block), part=part)
        item = self._item(block, is_done=True)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(name, body)


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _echo(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Returns the fields of a request that its response repeats."""
    given = request.model_dump(exclude={"input"}, exclude_none=True, by_alias=True)
    return {
        "model": model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": given.get("temperature"),
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": given.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": given.get("user"),
    }
