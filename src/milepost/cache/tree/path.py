"""A prompt's path through the tree, and the checkpoints on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from milepost.cache.tree.chain import TOKEN_BYTES, Chain, num_tokens
from milepost.cache.tree.nodes import Checkpoint, Node


class Path:
    """A prompt's known prefix: its chain and the deepest node that matches, or the root if none
    does. Walks go from there upwards, so they cost what they visit; `nodes` costs the whole path.
    """

    def __init__(self, chain: Chain, end: Node) -> None:
        self.chain = chain
        self.end = end

    @property
    def num_pages(self) -> int:
        """Number of resident full pages."""
        return self.end.depth

    @property
    def kv_length(self) -> int:
        """Number of tokens in the resident full pages."""
        return self.num_pages * self.chain.page_size

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """The matching nodes without the root, the shallowest first."""
        return [node for node in self.end.ancestors() if not node.is_root][::-1]

    @cached_property
    def pages(self) -> list[int]:
        """Pages of the matching nodes."""
        return [node.page for node in self.nodes]

    def deepest_checkpoint(self, limit: int) -> Checkpoint | None:
        """Returns the deepest checkpoint at or before `limit` whose tail matches the prompt too."""
        for node in self.end.ancestors():
            best = self.deepest_on(node, limit) if node.checkpoints else None
            if best is not None:
                return best
        return None

    def deepest_on(self, node: Node, limit: int) -> Checkpoint | None:
        """Returns the deepest checkpoint on `node`, up to `limit`, whose tail matches
        the prompt."""
        start = node.depth * self.chain.page_size
        if not node.checkpoints or limit < start:
            return None
        rest = self.chain.content(start, min(limit, start + self.chain.page_size - 1))
        tails = node.checkpoints
        if len(tails) * TOKEN_BYTES <= len(rest):
            matching = [tail for tail in tails if rest.startswith(tail)]
            return tails[max(matching, key=len)] if matching else None
        for length in range(len(rest), -1, -TOKEN_BYTES):
            if (checkpoint := tails.get(rest[:length])) is not None:
                return checkpoint
        return None

    def evicted_position(self, above: int) -> int:
        """Returns the position of the deepest state after `above` that was evicted from this path;
        0 if none is remembered."""
        for node in self.end.ancestors():
            start, tail = node.depth * self.chain.page_size, node.evicted_tail
            if start + self.chain.page_size <= above:
                break
            if tail is not None:
                position = start + num_tokens(tail)
                if self.chain.content(start, position) == tail:
                    return position
        return 0
