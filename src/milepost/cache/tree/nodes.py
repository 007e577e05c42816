"""What the prefix tree is made of: one node for each full page, and the checkpoints that hang on
nodes, with their ends and reservations. They change through the tree (index.py) and the links.

A node's `num_reaching` counts its own checkpoints and those children below which there is one. At 0
no resume can ever use the node's page for a state: it is a stray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from milepost.cache.order import Order
from milepost.cache.tree.chain import checkpoint_key


class Node:
    """A full page of a known prefix, or a root (depth 0, no page). Compared and hashed by identity.

    `checkpoints` are keyed by their tails: several continuations may have ended inside the next
    page. `fork` holds the children where there are several, in the order of their tokens, so that
    those most alike stand side by side; `last_child` is the newest, or the only one.
    """

    __slots__ = (
        "checkpoints",
        "depth",
        "digest",
        "evicted_tail",
        "fork",
        "last_child",
        "num_children",
        "num_reaching",
        "page",
        "parent",
        "tokens",
        "twin",
    )

    def __init__(self, digest: bytes, page: int, parent: Node | None, tokens: bytes) -> None:
        self.digest = digest
        self.page = page
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.tokens = tokens
        self.num_children = 0
        self.num_reaching = 0
        self.last_child: Node | None = None
        self.fork: list[Node] | None = None
        self.checkpoints: dict[bytes, Checkpoint] = NO_CHECKPOINTS
        self.evicted_tail: bytes | None = None
        self.twin: bytes | None = None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def ancestors(self) -> Iterator[Node]:
        """This node, then its parents up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class End:
    """Where the newest request on a path ended, or will: shared by the path's checkpoints."""

    position: int
    time: int
    """In requests."""
    num_returns: int = 0
    """Times that the path was returned to before."""
    counted_age: int = 0
    """Up to which age its wait for a return has been counted."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A waiting request's claim on what it will resume from."""

    due: int
    """When its turn comes if all before it go first, in requests."""
    checkpoint: Checkpoint | None = None


class Checkpoint:
    """A cached state after exactly `position` tokens, on the node of its last full page.

    Inside a page it also owns `tail_page`, which holds the KV of the `tail` tokens (packed uint32)
    past the node. `above` is the next shallower checkpoint on its path, `below` those that have
    this one above them, the path that was used last at the end. `reservations` are those of waiting
    requests that would resume here, the earliest first. `saved` is for the worth to note.
    """

    __slots__ = (
        "above",
        "below",
        "end",
        "kind",
        "node",
        "num_uses",
        "position",
        "reservations",
        "saved",
        "slot",
        "tail",
        "tail_page",
        "used_at",
    )

    def __init__(
        self,
        *,
        position: int,
        slot: int,
        node: Node,
        kind: str,
        tail: bytes,
        tail_page: int | None,
        end: End,
    ) -> None:
        self.position = position
        self.slot = slot
        self.node = node
        self.kind = kind
        self.tail = tail
        self.tail_page = tail_page
        self.num_uses = 0
        self.used_at = end.time
        self.end = end
        self.saved = 0.0
        self.above: Checkpoint | None = None
        self.below: dict[Checkpoint, None] = {}
        self.reservations: Order[Reservation] = NO_RESERVATIONS

    @property
    def key(self) -> bytes:
        """The same for this state in every process."""
        return checkpoint_key(self.node.digest, self.tail)

    @property
    def deeper(self) -> Checkpoint | None:
        """The next deeper checkpoint on the path that was used last."""
        return next(reversed(self.below), None)

    @property
    def replay_tokens(self) -> int:
        """Tokens to compute again without this checkpoint: back to the next one above."""
        return self.position - (self.above.position if self.above is not None else 0)


NO_PAGE: Final = -1
NO_RESERVATIONS: Final[Order[Reservation]] = Order()
"""Shared by the checkpoints that nobody waits for; never written."""
NO_CHECKPOINTS: Final[dict[bytes, Checkpoint]] = {}
"""Shared by the many nodes without checkpoints; never written."""
