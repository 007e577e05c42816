"""Makes room in the pools by evicting what is only cached.

Owns the three orders of what may go: strays (pages no resume can reach), carriers (checkpoints
whose eviction frees a page), and states (checkpoints whose slot can be freed). Keeps them exact:
whoever changes a node's children, checkpoints or pins calls `rank` for it. Changes the tree and the
pools, and counts what it evicts.
"""

from __future__ import annotations

from milepost.cache.eviction import Order, replay_tokens
from milepost.cache.pool import Pool
from milepost.cache.report import Stats
from milepost.cache.slots import Slots
from milepost.cache.tree import Checkpoint, Node, Tree


class Reclaimer:
    """Evicts from `tree` to free ids of `pages` and `slots`."""

    __slots__ = (
        "_carriers",
        "_inflation",
        "_pages",
        "_slots",
        "_states",
        "_stray_clock",
        "_strays",
        "_tree",
        "stats",
    )

    def __init__(self, tree: Tree, pages: Pool, slots: Slots, stats: Stats) -> None:
        self._tree = tree
        self._pages = pages
        self._slots = slots
        self.stats = stats
        self._strays: Order[Node] = Order()
        self._carriers: Order[Checkpoint] = Order()
        self._states: Order[Checkpoint] = Order()
        self._inflation = 0.0
        self._stray_clock = 0

    def candidates(self) -> tuple[Order[Node], Order[Checkpoint], Order[Checkpoint]]:
        """The orders of strays, carriers and states; for checks alone."""
        return self._strays, self._carriers, self._states

    def allocate_pages(self, num: int) -> list[int]:
        """Pages with one live reference each; evicts what is missing.

        The caller has checked the pool's room.
        """
        while self._pages.num_free < num:
            self._free_a_page()
        return self._pages.allocate(num)

    def allocate_slot(self) -> int:
        """A slot with one live reference; evicts if none is free. The caller has checked the pool's
        room.
        """
        if not self._slots.pool.num_free:
            self._evict_lowest(self._states, "slots")
        return self._slots.allocate()

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint was made or used: its age starts again."""
        checkpoint.age = self._inflation
        checkpoint.priority = checkpoint.age + replay_tokens(checkpoint)
        self.rank_checkpoint(checkpoint)

    def rank(self, node: Node) -> None:
        """Bring the orders in step with a node whose children, checkpoints or pins have changed."""
        leaf = not node.is_root and not node.num_children and not self._pages.live_refs(node.page)
        if leaf and not node.num_reaching:
            if node not in self._strays:
                self._stray_clock += 1
                self._strays.push(node, self._stray_clock)
        else:
            self._strays.discard(node)
        for checkpoint in node.checkpoints.values():
            self.rank_checkpoint(checkpoint)

    def rank_page(self, page: int) -> None:
        """Like `rank`, for a page that was pinned or unpinned alone, as a copy's source."""
        node = self._tree.at_page.get(page)
        if node is not None:
            self.rank(node)

    def rank_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Bring the orders in step with one checkpoint."""
        if self._slots.pool.live_refs(checkpoint.slot):
            self._states.discard(checkpoint)
            self._carriers.discard(checkpoint)
            return
        self._states.push(checkpoint, checkpoint.priority)
        if self._carries_page(checkpoint):
            self._carriers.push(checkpoint, checkpoint.priority)
        else:
            self._carriers.discard(checkpoint)

    def evict_checkpoint(self, checkpoint: Checkpoint, cause: str) -> None:
        """Take a checkpoint out; its slot and tail page lose their cached references."""
        self._states.discard(checkpoint)
        self._carriers.discard(checkpoint)
        self.stats.evicted(cause, used=checkpoint.num_uses > 0)
        node = checkpoint.node
        node.evicted_position = max(node.evicted_position, checkpoint.position)
        strays = self._tree.detach(checkpoint)
        self._slots.pool.drop(checkpoint.slot)
        if checkpoint.tail_page is not None:
            self._pages.drop(checkpoint.tail_page)
        if strays:
            self.rank(strays[0])

    def evict_everything(self) -> None:
        """Take out every checkpoint and page that no running request holds."""
        while (found := self._states.pop()) is not None:
            self.evict_checkpoint(found[0], "reset")
        while (stray := self._strays.pop()) is not None:
            self._evict_page(*stray)

    def _carries_page(self, checkpoint: Checkpoint) -> bool:
        node = checkpoint.node
        if checkpoint.tail_page is not None:
            return True
        return not node.is_root and not node.num_children and not self._pages.live_refs(node.page)

    def _free_a_page(self) -> None:
        stray = self._strays.pop()
        if stray is not None:
            self._evict_page(*stray)
            return
        self._evict_lowest(self._carriers, "pages")

    def _evict_lowest(self, order: Order[Checkpoint], cause: str) -> None:
        """Evict the checkpoint of lowest priority; one that has become dearer since it was ranked
        goes back.
        """
        while True:
            found = order.pop()
            assert found is not None, "E1: what is cached can be reached through the orders"
            checkpoint, ranked = found
            checkpoint.priority = checkpoint.age + replay_tokens(checkpoint)
            if checkpoint.priority <= ranked:
                break
            self.rank_checkpoint(checkpoint)
        self._inflation = max(self._inflation, ranked)
        self.evict_checkpoint(checkpoint, cause)

    def _evict_page(self, node: Node, key: float) -> None:
        """Evict a stray; a parent that becomes one goes next, so that a path goes in one piece."""
        parent = node.parent
        assert parent is not None, "T4: a root is not evicted"
        self._tree.remove(node)
        self._pages.drop(node.page)
        self.stats.pages_evicted += 1
        if not parent.is_root and not parent.num_children:
            self.rank(parent)
            if parent in self._strays:
                self._strays.push(parent, key)
