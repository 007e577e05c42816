"""Turns the deltas of an answer into events, counts its reasoning tokens, and groups events into
blocks: the Messages and Responses endpoints stream an answer as a row of blocks of reasoning, text
and calls, each with a start, its deltas and an end."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from milepost.engine.processes import Delta
from milepost.server.parsing.answer import TextParser
from milepost.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from milepost.server.tools import CustomInput


class AnswerParser:
    """Parses one answer's text, and drops what the request does not want. The arguments of a custom
    tool's call are its input."""

    def __init__(
        self,
        parser: TextParser,
        *,
        has_reasoning: bool,
        has_one_call: bool,
        customs: frozenset[str] = frozenset(),
        end_of_reasoning: int | None = None,
    ) -> None:
        self._parser = parser
        self._reasoning = ReasoningCount(end_of_reasoning)
        self._has_reasoning = has_reasoning
        self._has_one_call = has_one_call
        self.customs = customs
        self._input: CustomInput | None = None
        """The input of the current call, if it calls a custom tool."""
        self._num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.count

    @property
    def is_enough(self) -> bool:
        """Whether the answer is complete for the client although the model goes on."""
        return self._has_one_call and self._parser.has_ended_call

    def feed(self, delta: Delta) -> list[Event]:
        """Returns the events that a delta adds."""
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish(is_cut=_is_cut(delta))
        self._reasoning.feed(delta.token_ids, events)
        if len(events) == 1 and type(events[0]) is Content and self._input is None:  # most deltas
            return events
        wanted = [found for found in events if self._is_wanted(found)]
        return self._with_inputs(wanted, is_over=delta.finish_reason is not None)

    def _is_wanted(self, found: Event) -> bool:
        if isinstance(found, Reasoning):
            return self._has_reasoning
        self._num_calls += isinstance(found, CallStart)
        is_call = isinstance(found, CallStart | CallArguments)
        return not (is_call and self._has_one_call and self._num_calls > 1)

    def _with_inputs(self, events: list[Event], *, is_over: bool) -> list[Event]:
        if not self.customs:
            return events
        found: list[Event] = []
        for event in events:
            if self._input is not None and isinstance(event, CallArguments):
                found.append(CallArguments(self._input.feed(event.text)))
                continue
            found += self._rest_of_input()
            if isinstance(event, CallStart) and event.name in self.customs:
                self._input = CustomInput()
            found.append(event)
        if is_over:
            found += self._rest_of_input()
        return [each for each in found if not isinstance(each, CallArguments) or each.text]

    def _rest_of_input(self) -> list[Event]:
        over, self._input = self._input, None
        return [] if over is None else [CallArguments(over.finish())]


def _is_cut(delta: Delta) -> bool:
    """Returns whether an answer ended before the model ended it: at its maximum length, or at a
    string of the request's `stop`."""
    return delta.finish_reason != "stop" or isinstance(delta.stop_reason, str)


class ReasoningCount:
    """Counts an answer's reasoning tokens: those up to the token that closes reasoning, wherever
    deltas were joined. Without such a token, those up to the last delta with nothing else."""

    def __init__(self, end: int | None) -> None:
        self._end = end
        """The token that closes reasoning, if a single token does."""
        self._num_tokens = self._num_before_others = 0
        self._closed_at: int | None = None
        self._has_reasoning: bool | None = None
        self._is_last = False

    @property
    def count(self) -> int:
        if not self._has_reasoning:
            return 0
        return self._num_before_others if self._closed_at is None else self._closed_at

    def feed(self, token_ids: Sequence[int], events: Sequence[Event]) -> None:
        if self._closed_at is not None and self._has_reasoning is not None:
            return
        if self._closed_at is None and self._end in token_ids:
            self._closed_at = self._num_tokens + token_ids.index(self._end) + 1
        self._num_tokens += len(token_ids)
        if events:
            if self._has_reasoning is None:
                self._has_reasoning = isinstance(events[0], Reasoning)
            self._is_last = isinstance(events[-1], Reasoning)
        if self._is_last:
            self._num_before_others = self._num_tokens


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """One block, with the text that has arrived so far."""

    kind: BlockKind
    index: int
    name: str = ""
    """Name of the called function."""
    own_id: str = ""
    """The model's own id of a call; "" in formats without ids."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments as JSON text."""
        return "".join(self.pieces)

    def call_id(self, prefix: str) -> str:
        """Returns the id that a call's result refers to: the model's own, else one with this
        prefix."""
        return self.own_id or f"{prefix}_{self.id}"


@dataclass(frozen=True, slots=True)
class Step:
    """A change of a block: it begins, gets more text, or ends."""

    kind: Literal["opened", "gained", "closed"]
    block: AnswerBlock
    text: str = ""


class BlockAnswer:
    """One answer as a row of blocks. The last one may be open."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.blocks: list[AnswerBlock] = []
        self.open: AnswerBlock | None = None
        """The block that is still being written."""
        self.last_delta: Delta
        """The delta that ended the answer."""
        self.is_cut = False
        """Whether the open block ends because the answer has reached its maximum length."""

    def feed(self, delta: Delta) -> Iterator[Step]:
        """Yields the changes that a delta makes."""
        for found in self._parser.feed(delta):
            if isinstance(found, CallStart):
                yield from self._begin("call", found.name, found.id)
                continue
            kind = _KINDS[type(found)]
            if self.open is None or self.open.kind != kind:
                yield from self._begin(kind)
            assert self.open is not None
            self.open.pieces.append(found.text)
            yield Step("gained", self.open, found.text)

        if delta.finish_reason is not None:
            self.last_delta, self.is_cut = delta, delta.finish_reason == "length"
            yield from self._close()

    def _close(self) -> Iterator[Step]:
        if self.open is not None:
            yield Step("closed", self.open)
            self.open = None

    def _begin(self, kind: BlockKind, name: str = "", own_id: str = "") -> Iterator[Step]:
        yield from self._close()
        self.open = AnswerBlock(kind, len(self.blocks), name, own_id)
        self.blocks.append(self.open)
        yield Step("opened", self.open)


async def read_whole(
    arriving: AsyncIterable[list[tuple[int, Delta]]], feed: Callable[[Delta], Iterable[Step]]
) -> None:
    """Feeds all deltas of an answer, whose changes nobody reads."""
    async for deltas in arriving:
        for _, delta in deltas:
            for _ in feed(delta):
                pass


_KINDS: dict[type[Event], BlockKind] = {
    Reasoning: "reasoning",
    Content: "text",
    CallArguments: "call",
}
