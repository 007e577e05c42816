"""A response and its events, in the order and the form of the official API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from milepost.engine.wire import Delta
from milepost.server import errors, logprobs
from milepost.server.blocks import AnswerBlock, Blocks, Closed, Gained, Opened, Step
from milepost.server.conversation import ChatTurn
from milepost.server.logprobs import TokenBytes, TokensOfTexts
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.stream import named_event

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_TEXTS = {"reasoning": "response.reasoning_text", "text": "response.output_text"}


class Writer:
    """Brings one response into its form; `on_end` gets it when it is whole."""

    def __init__(
        self,
        request: ResponsesRequest,
        turn: ChatTurn,
        model: str,
        octets: TokenBytes | None,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._request = request
        self._turn = turn
        self._octets = octets
        self._on_end = on_end
        self._blocks = Blocks()
        self._tokens = TokensOfTexts()
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        """By block, of those that are text."""
        self._token_ids: list[int] = []
        self._num_before_others = 0
        """Tokens with which the last block was one of reasoning."""
        self._end: Delta | None = None
        self._num_events = 0
        self._created = int(time.time())
        self._head = _echo(request, model)

    async def whole(self) -> dict[str, Any]:
        async for deltas in self._turn.generation.deltas():
            for _, delta in deltas:
                for _ in self._steps(delta):
                    pass
        return {**self._ended(), **self._turn.generation.transfer()}

    async def events(self) -> AsyncIterator[bytes]:
        arrived = self._turn.generation.deltas()
        begun = self.body("in_progress")
        yield self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )
        try:
            async for deltas in arrived:
                steps = [step for _, delta in deltas for step in self._steps(delta)]
                yield b"".join(event for step in steps for event in self._events_of(step))
            body = self._ended()
            yield self._event(f"response.{body['status']}", response=body)
        finally:
            await arrived.aclose()

    def failed(self, error: Exception) -> bytes:
        """The last event of a response that did not come to its end."""
        found = errors.body_of(error)["error"]
        body = self.body("failed")
        body["error"] = {"code": "server_error", "message": found["message"]}
        return self._event("response.failed", response=body)

    def _steps(self, delta: Delta) -> Iterator[Step]:
        if self._octets is not None:
            num_top = self._request.top_logprobs or 0
            self._tokens.add(logprobs.chat_content(delta, num_top, self._octets))
        for step in self._blocks.feed(self._turn.answers[0].feed(delta)):
            yield self._scored(step)
        self._token_ids += delta.token_ids
        if self._blocks.all and self._blocks.all[-1].kind == "reasoning":
            self._num_before_others = len(self._token_ids)
        if delta.finish_reason is not None:
            self._end = delta
            for step in self._blocks.end():
                yield self._scored(step)

    def _scored(self, step: Step) -> Step:
        """Also keeps the log-probabilities of a text that is over."""
        if self._octets is not None and isinstance(step, Closed):
            claimed = self._tokens.claim(step.block.text)
            if step.block.kind == "text":
                self._logprobs[step.block.index] = claimed or []
        return step

    # --- the whole --------------------------------------------------------------------------------

    def _ended(self) -> dict[str, Any]:
        assert self._end is not None, "an answer ends"
        is_cut = self._end.finish_reason == "length"
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
            "output": [self._item(block, is_done=True) for block in self._blocks.all],
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }

    def _num_reasoning_tokens(self) -> int:
        """Up to the token that closes the reasoning, wherever deltas were joined. Where no such
        token came, up to the last delta without anything else."""
        if not self._blocks.all or self._blocks.all[0].kind != "reasoning":
            return 0
        end = self._turn.end_of_reasoning
        if end in self._token_ids:
            return self._token_ids.index(end) + 1
        return self._num_before_others

    def _item(self, block: AnswerBlock, *, is_done: bool) -> dict[str, Any]:
        status = "completed" if is_done else "in_progress"
        item: dict[str, Any] = {"id": _id(block), "status": status}
        if block.kind == "call":
            arguments = block.text if is_done else ""
            call = {"call_id": block.call_id("call"), "name": block.name, "arguments": arguments}
            return {**item, "type": "function_call", **call}
        content = [self._part(block)] if is_done else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: AnswerBlock, text: str | None = None) -> dict[str, Any]:
        text = block.text if text is None else text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        own = self._logprobs.get(block.index, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": own}

    # --- its events -------------------------------------------------------------------------------

    def _events_of(self, step: Step) -> Iterator[bytes]:
        match step:
            case Opened(block):
                yield from self._opened(block)
            case Gained(block, text):
                yield self._gained(block, text)
            case Closed(block):
                yield from self._closed(block)

    def _opened(self, block: AnswerBlock) -> Iterator[bytes]:
        item = self._item(block, is_done=False)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = self._part(block, "")
            yield self._event("response.content_part.added", **_place(block), part=part)

    def _gained(self, block: AnswerBlock, text: str) -> bytes:
        if block.kind == "call":
            place = {"item_id": _id(block), "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        own = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"{_TEXTS[block.kind]}.delta", **_place(block), delta=text, **own)

    def _closed(self, block: AnswerBlock) -> Iterator[bytes]:
        if block.kind == "call":
            place = {"item_id": _id(block), "output_index": block.index, "name": block.name}
            name = "response.function_call_arguments.done"
            yield self._event(name, **place, arguments=block.text)
        else:
            own = {"logprobs": self._logprobs.get(block.index, [])} if block.kind == "text" else {}
            name = f"{_TEXTS[block.kind]}.done"
            yield self._event(name, **_place(block), text=block.text, **own)
            part = self._part(block)
            yield self._event("response.content_part.done", **_place(block), part=part)
        item = self._item(block, is_done=True)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(name, body)


def _id(block: AnswerBlock) -> str:
    return f"{_PREFIXES[block.kind]}_{block.id}"


def _place(block: AnswerBlock) -> dict[str, Any]:
    return {"item_id": _id(block), "output_index": block.index, "content_index": 0}


def _echo(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """What a response says of its request."""
    given = request.model_dump(exclude_none=True, by_alias=True)
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
