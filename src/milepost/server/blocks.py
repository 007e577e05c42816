"""An answer as a row of blocks: reasoning, text, calls. The Messages and Responses endpoints stream
it this way, each block with a start, its deltas and an end."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from milepost.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """One block, as far as it has arrived."""

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
    """A block begins, gets more text, or ends."""

    kind: Literal["opened", "gained", "closed"]
    block: AnswerBlock
    text: str = ""


class Blocks:
    """Groups events into blocks. At most one is open."""

    def __init__(self) -> None:
        self.all: list[AnswerBlock] = []
        self.open: AnswerBlock | None = None
        """The block that is still being written."""

    def feed(self, events: Iterable[Event]) -> Iterator[Step]:
        for found in events:
            if isinstance(found, CallStart):
                yield from self._begin("call", found.name, found.id)
                continue
            kind = _KINDS[type(found)]
            if self.open is None or self.open.kind != kind:
                yield from self._begin(kind)
            assert self.open is not None
            self.open.pieces.append(found.text)
            yield Step("gained", self.open, found.text)

    def end(self) -> Iterator[Step]:
        """Closes the last block at the end of the answer."""
        if self.open is not None:
            yield Step("closed", self.open)
            self.open = None

    def _begin(self, kind: BlockKind, name: str = "", own_id: str = "") -> Iterator[Step]:
        yield from self.end()
        self.open = AnswerBlock(kind, len(self.all), name, own_id)
        self.all.append(self.open)
        yield Step("opened", self.open)


_KINDS: dict[type[Event], BlockKind] = {
    Reasoning: "reasoning",
    Content: "text",
    CallArguments: "call",
}
