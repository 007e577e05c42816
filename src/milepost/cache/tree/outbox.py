"""Writes down what becomes true of the tree, as events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from milepost.cache.plans import What
from milepost.cache.tree.index import Tree
from milepost.cache.tree.kinds import CacheConfig
from milepost.cache.tree.nodes import Checkpoint, Node


class Outbox:
    """Events that nobody has taken yet. Told by those who change the tree, right after they do; of
    what leaves, right before.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._page_size = config.page_size
        self._needs_states = config.slots_each > 0
        self._events: list[Event] = []
        self.is_open = False

    def open(self, tree: Tree) -> None:
        """Record from now on, and first what is there already."""
        self.is_open = True
        for node in tree.nodes.values():
            self.pages_came([node])
        for checkpoint in tree.at_slot.values():
            self.state_came(checkpoint, 0)
        if self._needs_states:
            for node in tree.nodes.values():
                if node.num_reaching:
                    self._reached([node])

    def take(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events

    def pages_came(self, run: Sequence[Node]) -> None:
        parent = run[0].parent
        assert parent is not None, "a page has a parent"
        self._events.append(
            PagesCached(
                keys=_keys(run),
                parent=parent.digest,
                tokens=_tokens(run),
                position=parent.depth * self._page_size,
                ids=tuple(node.page for node in run),
                is_salted=run[0].twin is not None,
            )
        )
        if not self._needs_states:
            self._reached(run)

    def state_came(self, checkpoint: Checkpoint, num_reached: int) -> None:
        """With so many nodes, its own and those above it, that can be reached by now."""
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

    def state_goes(self, checkpoint: Checkpoint, score: float, num_moves: int) -> None:
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
                    num_moves=num_moves,
                )
            )

    def reach_lost(self, node: Node, num_lost: int) -> None:
        """So many nodes, this one and those above it, cannot be reached any more."""
        run = _upwards(node, num_lost)
        if run:
            self._events.append(PagesUnreachable(keys=_keys(run)))

    def pages_go(self, run: Sequence[Node], num_moves: int) -> None:
        """The deepest first."""
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
                    num_moves=num_moves,
                )
            )

    def cleared(self) -> None:
        """In place of all that left since `take`, and of what goes now."""
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
                is_salted=run[0].twin is not None,
            )
        )


def _upwards(node: Node, num: int) -> list[Node]:
    """So many nodes, but for the root."""
    return [above for above in islice(node.ancestors(), num) if not above.is_root]


def _keys(run: Iterable[Node]) -> tuple[bytes, ...]:
    return tuple(node.digest for node in run)


def _tokens(run: Iterable[Node]) -> bytes:
    return b"".join(node.tokens for node in run)
