"""What is waiting to be taken outside: copies of pages, and events once somebody listens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from milepost.cache.events import (
    Cleared,
    Departure,
    Event,
    PagesCached,
    PagesReachable,
    PagesUnreachable,
    StateCached,
)
from milepost.cache.plans import PageMove, What
from milepost.cache.tree.nodes import Checkpoint, Node


class Outbox:
    """Moves and events that nobody has taken yet. The tree writes down what it does, right after;
    events only while the outbox is open.
    """

    def __init__(self, page_size: int, *, needs_states: bool) -> None:
        self._page_size = page_size
        self._needs_states = needs_states
        self._events: list[Event] = []
        self.moves: list[PageMove] = []
        """Copies that are yet to be made, in this order, before anything else is written."""
        self.is_open = False

    def open(self, nodes: Collection[Node], checkpoints: Iterable[Checkpoint]) -> None:
        """Record from now on, and first what is there already."""
        self.is_open = True
        for node in nodes:
            self.pages_came([node])
        for checkpoint in checkpoints:
            self.state_came(checkpoint, 0)
        if self._needs_states:
            for node in nodes:
                if node.num_reaching:
                    self._reached([node])

    def take_events(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events

    def take_moves(self) -> tuple[PageMove, ...]:
        moves, self.moves = tuple(self.moves), []
        return moves

    def pages_came(self, run: Sequence[Node]) -> None:
        if not self.is_open:
            return
        parent = run[0].parent
        assert parent is not None, "a page has a parent"
        self._events.append(
            PagesCached(
                keys=_keys(run),
                parent=parent.digest,
                tokens=_tokens(run),
                position=parent.depth * self._page_size,
                ids=tuple(node.page for node in run),
                is_salted=run[0].is_salted,
            )
        )
        if not self._needs_states:
            self._reached(run)

    def state_came(self, checkpoint: Checkpoint, num_reached: int) -> None:
        """With so many nodes, its own and those above it, that can be reached by now."""
        if not self.is_open:
            return
        self._events.append(
            StateCached(
                key=checkpoint.key,
                parent=checkpoint.node.digest,
                tokens=checkpoint.tail,
                position=checkpoint.position,
                id=checkpoint.slot,
                tail_page=checkpoint.tail_page,
                kind=checkpoint.kind,
            )
        )
        run = _upwards(checkpoint.node, num_reached)
        if run:
            self._reached(run[::-1])

    def state_went(self, checkpoint: Checkpoint, score: float, num_lost: int) -> None:
        """With so many nodes, its own and those above it, that cannot be reached any more."""
        if not self.is_open:
            return
        places: list[tuple[What, int]] = [("state", checkpoint.slot)]
        if checkpoint.tail_page is not None:
            places.append(("tail", checkpoint.tail_page))
        for what, id_ in places:
            self._events.append(
                Departure(
                    key=checkpoint.key,
                    parent=checkpoint.node.digest,
                    tokens=checkpoint.tail,
                    position=checkpoint.position,
                    what=what,
                    id=id_,
                    score=score,
                    num_moves=len(self.moves),
                )
            )
        run = _upwards(checkpoint.node, num_lost)
        if run:
            self._events.append(PagesUnreachable(keys=_keys(run)))

    def pages_went(self, run: Sequence[Node]) -> None:
        """The deepest first."""
        if not self.is_open:
            return
        if not self._needs_states:
            self._events.append(PagesUnreachable(keys=_keys(run)))
        for node in run:
            assert node.parent is not None, "a page has a parent"
            self._events.append(
                Departure(
                    key=node.digest,
                    parent=node.parent.digest,
                    tokens=node.tokens,
                    position=node.depth * self._page_size,
                    what="page",
                    id=node.page,
                    score=0.0,
                    num_moves=len(self.moves),
                )
            )

    def cleared(self) -> None:
        """Nothing is left that could have moved, or whose going is worth telling."""
        self.moves.clear()
        if self.is_open:
            self._events = [Cleared()]

    def _reached(self, run: Sequence[Node]) -> None:
        parent = run[0].parent
        assert parent is not None, "a page has a parent"
        self._events.append(
            PagesReachable(
                keys=_keys(run),
                parent=parent.digest,
                tokens=_tokens(run),
                position=parent.depth * self._page_size,
                is_salted=run[0].is_salted,
            )
        )


def _upwards(node: Node, num: int) -> list[Node]:
    """So many nodes, but for the root."""
    return [above for above in islice(node.ancestors(), num) if not above.is_root]


def _keys(run: Iterable[Node]) -> tuple[bytes, ...]:
    return tuple(node.digest for node in run)


def _tokens(run: Iterable[Node]) -> bytes:
    return b"".join(node.tokens for node in run)
