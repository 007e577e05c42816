"""Elements of the prefix tree: one node per full page, and the checkpoints that hang on nodes, with
their ends and reservations. They are changed by the tree (index.py) and the links.

A node's `num_reaching` counts its own checkpoints, plus the children with a checkpoint at or below
them. At 0 no resume can use the node's page: it is a stray.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from milepost.cache.order import Order
from milepost.cache.tree.chain import Chain, checkpoint_key

MAX_TAILS_COMPARED = 8
"""Number of tails compared, the newest ones: thousands of short prompts may end inside the same
page."""


@dataclass(slots=True, eq=False)
class Node:
    """A full page of a known prefix, or a root (depth 0, no page). Compared and hashed by identity.

    `checkpoints` are keyed by their tails, since several continuations may end inside the next
    page. `children` are sorted by content, so similar ones are adjacent; `last_child` is the
    newest, or the only one.
    """

    digest: bytes
    page: int
    parent: Node | None
    content: bytes
    depth: int = 0
    is_salted: bool = False
    num_reaching: int = 0
    children: list[Node] = field(default_factory=lambda: NO_CHILDREN)
    last_child: Node | None = None
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=lambda: NO_CHECKPOINTS)
    evicted_tail: bytes | None = None

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.depth, self.is_salted = self.parent.depth + 1, self.parent.is_salted

    @classmethod
    def root(cls, chain: Chain) -> Node:
        """Returns a new root for a chain."""
        return cls(chain.root, NO_PAGE, None, b"", is_salted=bool(chain.salt))

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def child(self, content: bytes) -> Node | None:
        """Returns the child with this content."""
        return next((child for child in self.alike(content) if child.content == content), None)

    def alike(self, content: bytes) -> list[Node]:
        """Returns the children whose content begins most like `content`; at most two."""
        place = bisect_left(self.children, content, key=_content)
        return self.children[max(place - 1, 0) : place + 1]

    def add_child(self, node: Node) -> None:
        if self.children:
            insort(self.children, node, key=_content)
        else:
            self.children = [node]
        self.last_child = node

    def remove_child(self, node: Node) -> None:
        del self.children[bisect_left(self.children, node.content, key=_content)]
        if len(self.children) == 1:
            self.last_child = self.children[0]
        elif self.last_child is node:
            self.last_child = None

    def newest(self) -> list[Checkpoint]:
        """Returns the newest of its checkpoints, the very newest last."""
        return list(islice(reversed(self.checkpoints.values()), MAX_TAILS_COMPARED))[::-1]

    def ancestors(self) -> Iterator[Node]:
        """Yields this node, then its parents up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class End:
    """The end of the newest request on a path, shared by the path's checkpoints. Or a fork, with
    the time at which a prompt last left the path there."""

    position: int
    time: int
    """Time of the end, counted in requests."""
    num_returns: int = 0
    """How often the path had been returned to before."""
    counted_age: int = 0
    """Age up to which the wait for a return has been counted."""
    has_returned: bool = False
    """Whether a request that continues the path has arrived. It may still be waiting."""
    grown_from: int | None = None
    """End position of the path that this one continues."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A waiting request's claim on the checkpoint that it will resume from. This return is certain,
    so the checkpoint is worth more than one that may or may not be asked for."""

    due: int
    """Clock of the score at its turn, if all requests before it go first."""
    is_first: bool = True
    """Whether the request has never been admitted before."""
    checkpoint: Checkpoint | None = None
    end: End | None = None
    """The end that the request's path will have, made when it arrived."""

    def move(self, checkpoint: Checkpoint | None) -> None:
        """Moves the reservation to a checkpoint, or to none."""
        if self.checkpoint is not None:
            self.checkpoint.reservations.discard(self)
        self.checkpoint = checkpoint
        if checkpoint is not None:
            checkpoint.reservations.push(self, self.due)


@dataclass(slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A cached state after exactly `position` tokens, on the node of its last full page."""

    position: int
    slot: int
    node: Node
    kind: str
    tail: bytes
    """The content after the node's page, if the position is inside the next page."""
    tail_page: int | None
    """The checkpoint's own page, which holds the KV of the tail."""
    end: End
    windows: tuple[int, ...] = ()
    """Pages with the KV of the last tokens in layers with a sliding window."""
    num_uses: int = 0
    used_at: int = field(init=False)
    saved: float = 0.0
    """Number of tokens expected to be saved each time the path is continued. The score stores it
    here."""
    above: Checkpoint | None = None
    """The next shallower checkpoint on its path."""
    below: dict[Checkpoint, None] = field(default_factory=dict)
    """The checkpoints whose `above` is this one; the one on the path used last comes last."""
    reservations: Order[Reservation] = field(default_factory=Order)
    """Reservations of waiting requests that will resume here, the earliest first."""

    def __post_init__(self) -> None:
        self.used_at = self.end.time

    @property
    def key(self) -> bytes:
        """The key of this state, equal in every process."""
        return checkpoint_key(self.node.digest, self.tail)

    @property
    def tail_pages(self) -> tuple[int, ...]:
        """Its tail page, if it has one."""
        return (self.tail_page,) if self.tail_page is not None else ()

    @property
    def deeper(self) -> Checkpoint | None:
        """The next deeper checkpoint on the path that was used last."""
        return next(reversed(self.below), None)

    @property
    def replay_tokens(self) -> int:
        """Number of tokens to compute again without this checkpoint: those since the next one
        above."""
        return self.position - (self.above.position if self.above is not None else 0)


def _content(node: Node) -> bytes:
    return node.content


NO_PAGE: Final = -1
NO_CHILDREN: Final[list[Node]] = []
NO_CHECKPOINTS: Final[dict[bytes, Checkpoint]] = {}
"""Empty collections shared by all nodes without children or checkpoints. Never written."""
