"""Links each checkpoint with the next shallower one on its path, and updates the links as
checkpoints are added and removed.

A link upward always leads to the deepest checkpoint above. To bound the cost, only the newest few
of many checkpoints on one node are considered, and only the newest of several known continuations
below a new checkpoint. The links of the others may then skip the new checkpoint, which overstates
what recomputing them costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from milepost.cache.tree.nodes import Checkpoint


def link(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Links a checkpoint that was just attached. Returns the checkpoints whose links
    have changed."""
    above = _nearest_above(checkpoint)
    moved = [c for c in _nearest_below(checkpoint) if c.above is above]
    for deeper in moved:
        if above is not None:
            del above.below[deeper]
        deeper.above = checkpoint
        checkpoint.below[deeper] = None
    checkpoint.above = above
    if above is None:
        return moved
    above.below[checkpoint] = None
    return [*moved, above]


def unlink(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Unlinks a checkpoint. Returns the checkpoints whose links have changed."""
    above, below = checkpoint.above, checkpoint.below
    for deeper in below:
        deeper.above = above
    if above is None:
        return list(below)
    is_newest = above.deeper is checkpoint
    del above.below[checkpoint]
    above.below = above.below | below if is_newest else below | above.below
    return [*below, above]


def upwards(checkpoint: Checkpoint | None) -> Iterator[Checkpoint]:
    """Yields this checkpoint, if any, and all above it."""
    while checkpoint is not None:
        yield checkpoint
        checkpoint = checkpoint.above


def follow(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yields this checkpoint and all above it, and makes each the newest below the next."""
    for here in upwards(checkpoint):
        if here.above is not None:
            del here.above.below[here]
            here.above.below[here] = None
        yield here


def _nearest_above(checkpoint: Checkpoint) -> Checkpoint | None:
    following = checkpoint.tail
    for node in checkpoint.node.ancestors():
        if node.checkpoints:
            shallower = [
                other
                for other in node.newest()
                if other is not checkpoint and following.startswith(other.tail)
            ]
            if shallower:
                return max(shallower, key=lambda c: c.position)
        following = node.content
    return None


def _nearest_below(checkpoint: Checkpoint) -> list[Checkpoint]:
    node, tail = checkpoint.node, checkpoint.tail
    here = [c for c in node.newest() if c is not checkpoint and c.tail.startswith(tail)]
    child = node.last_child
    if child is not None and not child.content.startswith(tail):
        return here
    while child is not None and child.num_reaching:
        if child.checkpoints:
            return here + child.newest()
        child = child.last_child
    return here
