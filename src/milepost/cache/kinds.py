"""What each kind of layer needs in order to resume: one class a kind, asked in turn until all
agree.

A new kind (a sliding window, say) is one more class with `longest_usable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from milepost.cache.chain import TOKEN_BYTES, Chain
from milepost.cache.tree import Checkpoint, Node


@dataclass(frozen=True, slots=True)
class Path:
    """A prompt's known prefix: its chain, the root if there is one, and the nodes that match."""

    chain: Chain
    root: Node | None
    nodes: Sequence[Node]

    @property
    def kv_length(self) -> int:
        """Tokens in the resident full pages."""
        return len(self.nodes) * self.chain.page_size

    def deepest_checkpoint(self, limit: int) -> Checkpoint | None:
        """The deepest checkpoint at or before `limit` whose tail matches the prompt too."""
        usable_pages = min(limit // self.chain.page_size, len(self.nodes))
        for index in range(usable_pages - 1, -1, -1):
            if self.nodes[index].checkpoints:
                best = self.deepest_on(self.nodes[index], limit)
                if best is not None:
                    return best
        return self.deepest_on(self.root, limit) if self.root is not None else None

    def deepest_tail(self, limit: int) -> Checkpoint | None:
        """Like `deepest_checkpoint`, but only where the resident full pages end."""
        end = self.nodes[-1] if self.nodes else self.root
        return self.deepest_on(end, limit) if end is not None else None

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
        nodes = [self.root, *self.nodes] if self.root is not None else list(self.nodes)
        return [
            checkpoint
            for node in nodes
            if node.checkpoints
            for checkpoint in sorted(node.checkpoints.values(), key=lambda c: c.position)
            if self._has_tail(checkpoint)
        ]

    def evicted_position(self) -> int:
        """Where the deepest state was that has been evicted from this path; 0 if none is known."""
        for node in reversed(self.nodes):
            if node.evicted_tail is not None and self._continues(node, node.evicted_tail):
                return self._position(node, node.evicted_tail)
        root = self.root
        if root is None or root.evicted_tail is None:
            return 0
        matches = self._continues(root, root.evicted_tail)
        return self._position(root, root.evicted_tail) if matches else 0

    def _has_tail(self, checkpoint: Checkpoint) -> bool:
        return self._continues(checkpoint.node, checkpoint.tail)

    def _continues(self, node: Node, tail: bytes) -> bool:
        start = node.depth * self.chain.page_size
        return self.chain.token_bytes(start, self._position(node, tail)) == tail

    def _position(self, node: Node, tail: bytes) -> int:
        return node.depth * self.chain.page_size + len(tail) // TOKEN_BYTES


class LayerKind(Protocol):
    def longest_usable(self, path: Path, limit: int) -> int:
        """The largest position up to `limit` at which layers of this kind can resume; 0 is always
        one.
        """
        ...


class FullAttention:
    """Needs the KV of every token before it: resident pages, or a checkpoint's tail page."""

    def longest_usable(self, path: Path, limit: int) -> int:
        if limit <= path.kv_length:
            return limit
        checkpoint = path.deepest_tail(limit)
        return max(path.kv_length, checkpoint.position if checkpoint else 0)


class Recurrent:
    """Needs a state after exactly that many tokens."""

    def longest_usable(self, path: Path, limit: int) -> int:
        checkpoint = path.deepest_checkpoint(limit)
        return checkpoint.position if checkpoint else 0


HYBRID: tuple[LayerKind, ...] = (FullAttention(), Recurrent())


def longest_usable(kinds: Sequence[LayerKind], path: Path, limit: int) -> int:
    """Lower the limit until every kind of layer can resume there."""
    while True:
        lowered = limit
        for kind in kinds:
            lowered = kind.longest_usable(path, lowered)
        if lowered == limit:
            return limit
        limit = lowered
