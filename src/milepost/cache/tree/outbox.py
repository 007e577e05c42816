"""Page moves and events that wait to be taken. Events are recorded only once somebody listens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

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
    """Page moves and events that were not taken yet. The tree reports each change right after
    it."""

    def __init__(self, page_size: int, *, needs_states: bool) -> None:
        self._page_size = page_size
        self._needs_states = needs_states
        self._events: list[Event] = []
        self.moves: list[PageMove] = []
        """Copies to be made, in this order, before anything else is written."""
        self.is_open = False

    def open(self, nodes: Collection[Node], checkpoints: Iterable[Checkpoint]) -> None:
        """Starts recording events, beginning with those of what is cached already."""
        self.is_open = True
        for node in nodes:
            self.pages_cached([node])
        for checkpoint in checkpoints:
            self.state_cached(checkpoint, 0)
        if self._needs_states:
            for node in nodes:
                self._reached([node] if node.num_reaching else [])

    def take_events(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events

    def take_moves(self) -> tuple[PageMove, ...]:
        moves, self.moves = tuple(self.moves), []
        return moves

    def pages_cached(self, run: Sequence[Node]) -> None:
        """Records that a run of pages was cached."""
        if not self.is_open:
            return
        ids = tuple(node.page for node in run)
        self._events.append(PagesCached(ids=ids, **self._facts(run)))
        if not self._needs_states:
            self._reached(run)

    def state_cached(self, checkpoint: Checkpoint, num_reached: int) -> None:
        """Records a cached state. It makes `num_reached` nodes reachable, from its own upwards."""
        if not self.is_open:
            return
        slot, page, kind = checkpoint.slot, checkpoint.tail_page, checkpoint.kind
        facts = _facts_of_state(checkpoint)
        self._events.append(StateCached(id=slot, tail_page=page, kind=kind, **facts))
        self._reached(_upwards(checkpoint.node, num_reached)[::-1])

    def state_evicted(self, checkpoint: Checkpoint, score: float, num_lost: int) -> None:
        """Records an evicted state. It leaves `num_lost` nodes unreachable, from its
        own upwards."""
        if not self.is_open:
            return
        facts = _facts_of_state(checkpoint)
        self._depart("state", checkpoint.slot, score, windows=checkpoint.windows, **facts)
        if checkpoint.tail_page is not None:
            self._depart("tail", checkpoint.tail_page, score, **facts)
        self._lost(_upwards(checkpoint.node, num_lost))

    def pages_evicted(self, run: Sequence[Node]) -> None:
        """Records that a run of pages was evicted, the deepest first."""
        if not self.is_open:
            return
        if not self._needs_states:
            self._lost(run)
        for node in run:
            assert node.parent is not None, "a page has a parent"
            facts = {"key": node.digest, "parent": node.parent.digest, "tokens": node.content}
            position = node.depth * self._page_size
            self._depart("page", node.page, 0.0, position=position, **facts)

    def cleared(self) -> None:
        """Records that the cache was reset, and drops what was not taken."""
        self.moves.clear()
        if self.is_open:
            self._events = [Cleared()]

    def _depart(self, what: What, id_: int, score: float, **facts: Any) -> None:
        num_moves = len(self.moves)
        self._events.append(Departure(what=what, id=id_, score=score, num_moves=num_moves, **facts))

    def _reached(self, run: Sequence[Node]) -> None:
        if run:
            self._events.append(PagesReachable(**self._facts(run)))

    def _lost(self, run: Iterable[Node]) -> None:
        keys = tuple(node.digest for node in run)
        if keys:
            self._events.append(PagesUnreachable(keys=keys))

    def _facts(self, run: Sequence[Node]) -> dict[str, Any]:
        """Fields that events about a run of pages share."""
        parent = run[0].parent
        assert parent is not None, "a page has a parent"
        return {
            "keys": tuple(node.digest for node in run),
            "parent": parent.digest,
            "tokens": b"".join(node.content for node in run),
            "position": parent.depth * self._page_size,
            "is_salted": run[0].is_salted,
        }


def _facts_of_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields that events about a state share."""
    return {
        "key": checkpoint.key,
        "parent": checkpoint.node.digest,
        "tokens": checkpoint.tail,
        "position": checkpoint.position,
    }


def _upwards(node: Node, num: int) -> list[Node]:
    """Returns the first `num` nodes from here upwards, without the root."""
    return [above for above in islice(node.ancestors(), num) if not above.is_root]
