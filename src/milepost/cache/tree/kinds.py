"""The kinds of layers: what each keeps of a sequence, where, and what it needs in order to resume.

A model is a tuple of kinds; they are asked in turn until all agree. A new kind is one more class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal, Protocol

from milepost.cache.tree.chain import TOKEN_BYTES, Chain
from milepost.cache.tree.nodes import Checkpoint, Node


class Path:
    """A prompt's known prefix: its chain, the root if there is one, and the deepest node that
    matches, the root itself if need be. To look from there upwards costs what is looked at; `nodes`
    costs the whole path.
    """

    __slots__ = ("_nodes", "_pages", "chain", "end", "root")

    def __init__(self, chain: Chain, root: Node | None, end: Node | None) -> None:
        self.chain = chain
        self.root = root
        self.end = end
        self._nodes: list[Node] | None = None
        self._pages: list[int] | None = None

    @property
    def num_pages(self) -> int:
        """Resident full pages."""
        return self.end.depth if self.end is not None else 0

    @property
    def kv_length(self) -> int:
        """Tokens in the resident full pages."""
        return self.num_pages * self.chain.page_size

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that match, without the root, shallowest first."""
        if self._nodes is None:
            self._nodes = [node for node in self._upwards() if not node.is_root]
            self._nodes.reverse()
        return self._nodes

    @property
    def pages(self) -> list[int]:
        """Those of its nodes."""
        if self._pages is None:
            self._pages = [node.page for node in self.nodes]
        return self._pages

    def _upwards(self) -> Iterator[Node]:
        """The nodes that match, the deepest first, the root last."""
        return iter(()) if self.end is None else self.end.ancestors()

    def deepest_checkpoint(self, limit: int) -> Checkpoint | None:
        """The deepest checkpoint at or before `limit` whose tail matches the prompt too."""
        usable_pages = limit // self.chain.page_size
        for node in self._upwards():
            if node.checkpoints and node.depth <= usable_pages:
                best = self.deepest_on(node, limit)
                if best is not None:
                    return best
        return None

    def deepest_tail(self, limit: int) -> Checkpoint | None:
        """Like `deepest_checkpoint`, but only where the resident full pages end."""
        return self.deepest_on(self.end, limit) if self.end is not None else None

    def deepest_on(self, node: Node, limit: int) -> Checkpoint | None:
        """The deepest matching checkpoint that hangs on `node`, up to `limit`."""
        if not node.checkpoints:
            return None
        start = node.depth * self.chain.page_size
        longest = min(limit - start, self.chain.page_size - 1)
        rest = self.chain.token_bytes(start, start + longest)
        for length in range(longest * TOKEN_BYTES, -1, -TOKEN_BYTES):
            checkpoint = node.checkpoints.get(rest[:length])
            if checkpoint is not None:
                return checkpoint
        return None

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints that a longer prompt on this path could use, shallowest first."""
        return [
            checkpoint
            for node in reversed(list(self._upwards()))
            if node.checkpoints
            for checkpoint in sorted(node.checkpoints.values(), key=lambda c: c.position)
            if self._has_tail(checkpoint)
        ]

    def evicted_position(self, above: int) -> int:
        """Where the deepest state behind `above` was that has been evicted from this path; 0 if
        none is known.
        """
        for node in self._upwards():
            if (node.depth + 1) * self.chain.page_size <= above:
                break
            if node.evicted_tail is not None and self._continues(node, node.evicted_tail):
                return self._position(node, node.evicted_tail)
        return 0

    def _has_tail(self, checkpoint: Checkpoint) -> bool:
        return self._continues(checkpoint.node, checkpoint.tail)

    def _continues(self, node: Node, tail: bytes) -> bool:
        start = node.depth * self.chain.page_size
        return self.chain.token_bytes(start, self._position(node, tail)) == tail

    def _position(self, node: Node, tail: bytes) -> int:
        return node.depth * self.chain.page_size + len(tail) // TOKEN_BYTES


Where = Literal["slot", "page", "none"]


class LayerKind(Protocol):
    """Facts of all layers of one kind together; bytes are those of one rank."""

    @property
    def grid(self) -> int:
        """A prefill can keep this kind's states at its multiples."""
        ...

    @property
    def where(self) -> Where:
        """Where a state lies: in a slot, beside each page, or there is none."""
        ...

    @property
    def state_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Of a page's KV, and of the state beside it."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens back that KV is read, the newest among them; None: all. 0: there is no KV."""
        ...

    def longest_usable(self, path: Path, limit: int) -> int:
        """The largest position up to `limit` at which layers of this kind can resume; 0 is always
        one.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Needs the KV of every token before it: resident pages, or a checkpoint's tail page."""

    page_bytes: int = 0
    window: int | None = None
    grid: int = 1
    where: Where = "none"
    state_bytes: int = 0

    def longest_usable(self, path: Path, limit: int) -> int:
        if limit <= path.kv_length:
            return limit
        checkpoint = path.deepest_tail(limit)
        return max(path.kv_length, checkpoint.position if checkpoint else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(FullAttention):
    """Reads the last `window` tokens alone. What lies before them stays in the tree, where it can
    be resumed from, but no page table needs it.
    """

    window: int | None = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """Needs a state after exactly that many tokens, from a slot. The default grid is the chunk of
    the kernels of Gated DeltaNet and KDA.
    """

    grid: int = 64
    state_bytes: int = 0
    where: Where = "slot"
    page_bytes: int = 0
    window: int | None = 0

    def longest_usable(self, path: Path, limit: int) -> int:
        checkpoint = path.deepest_checkpoint(limit)
        return checkpoint.position if checkpoint else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A state of a few rows, kept beside each page as it is at the page's end: every page boundary
    can be resumed.
    """

    grid: int
    """Tokens of a page."""
    page_bytes: int = 0
    state_bytes: int = 0
    where: Where = "page"
    window: int | None = 0

    def longest_usable(self, path: Path, limit: int) -> int:
        limit = min(limit, path.kv_length)
        return limit - limit % path.chain.page_size


HYBRID: tuple[LayerKind, ...] = (FullAttention(), Recurrent())
"""Full attention and Gated DeltaNet, of any sizes."""


def longest_usable(kinds: Sequence[LayerKind], path: Path, limit: int) -> int:
    """Lower the limit until every kind of layer can resume there."""
    while True:
        lowered = limit
        for kind in kinds:
            lowered = kind.longest_usable(path, lowered)
        if lowered == limit:
            return limit
        limit = lowered


def grid_of(kinds: Sequence[LayerKind]) -> int:
    """Where a prefill can keep the states of every kind."""
    return lcm(*(kind.grid for kind in kinds))


def window_of(kinds: Sequence[LayerKind]) -> int | None:
    """How far back some layer reads KV; None: to the start."""
    windows = [kind.window for kind in kinds]
    return None if None in windows else max(window for window in windows if window is not None)
