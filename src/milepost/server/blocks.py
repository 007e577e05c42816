"""An answer as a row of blocks: reasoning, text, calls. The Messages and Responses endpoints stream
it this way, each block with a start, its deltas and an end."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from milepost.server.parsing.events import CallArguments, CallStart, Event, Reasoning


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """One block, as far as it has arrived."""

    kind: Literal["reasoning", "text", "call"]
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
class Opened:
    block: AnswerBlock


@dataclass(frozen=True, slots=True)
class Gained:
    block: AnswerBlock
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: AnswerBlock


Step = Opened | Gained | Closed


class Blocks:
    """Groups events into blocks. At most one is open."""

    def __init__(self) -> None:
        self.all: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    @property
    def open(self) -> AnswerBlock | None:
        """The block that is still being written."""
        return self._open

    def feed(self, events: Iterable[Event]) -> Iterator[Step]:
        for found in events:
            if isinstance(found, CallStart):
                yield from self._begin("call", found.name, found.id)
                continue
            kind = _kind(found)
            if self._open is None or self._open.kind != kind:
                yield from self._begin(kind)
            assert self._open is not None
            self._open.pieces.append(found.text)
            yield Gained(self._open, found.text)

    def end(self) -> Iterator[Step]:
        """Closes the last block at the end of the answer."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], name: str = "", own_id: str = ""
    ) -> Iterator[Step]:
        yield from self.end()
        self._open = AnswerBlock(kind, len(self.all), name, own_id)
        self.all.append(self._open)
        yield Opened(self._open)


def _kind(found: Event) -> Literal["reasoning", "text", "call"]:
    if isinstance(found, Reasoning):
        return "reasoning"
    return "call" if isinstance(found, CallArguments) else "text"
