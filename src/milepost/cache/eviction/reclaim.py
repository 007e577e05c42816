"""Makes room in the pools by evicting what is merely cached.

Owns three orders of eviction: strays (pages that no resume can reach), carriers (checkpoints whose
eviction frees a page), and states (checkpoints whose slot can be freed). Changes the tree and the
pools, and counts what it evicts.

The orders are never stale when read: the tree records each change of children and checkpoints, and
the pools each pin of a leaf or of a checkpoint's slot, and what is recorded is processed before an
order is read. A change costs one entry, however long the path.

In a unified pool every checkpoint carries pages, since its slot can become pages. So carriers are
the same as states, and the lowest score per byte goes first, whichever kind of memory is needed. A
slot needs a contiguous unit, so scattered free pages could force states out although there is room
for them. Cached pages that no running request holds are therefore moved together.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from milepost.cache.eviction.buckets import Buckets
from milepost.cache.eviction.score import Score
from milepost.cache.memory import Pool, Storage, UnifiedPool
from milepost.cache.report import Stats
from milepost.cache.tree import Checkpoint, Node, Reservation, Tree


class Reclaimer:
    """Evicts from `tree` to free pages and slots of `storage`."""

    def __init__(
        self,
        tree: Tree,
        storage: Storage,
        stats: Stats,
        score: Score,
        page_size: int,
        windows: Pool,
    ) -> None:
        self.tree = tree
        self._windows = windows
        self.storage = storage
        self._pages = storage.pages
        self._slots = storage.slots
        self.stats = stats
        self.score = score
        self._page_size = page_size
        self.strays: OrderedDict[Node, None] = OrderedDict()
        """Strays, the oldest first. Like the other orders, up to date only after `settle`."""
        self.carriers = Buckets(score, self._score_per_page)
        self.states = self.carriers if storage.pages_a_slot else Buckets(score, score.of)
        self.version = 0
        """Version of the cache's content. A match of an earlier version is outdated."""
        self._pages.watch(tree.leaves, tree.changed_nodes)
        self._slots.watch(tree.at_slot, tree.changed_checkpoints)

    def change(self) -> None:
        """Records that the cache is about to change, which makes earlier matches outdated."""
        self.version += 1
        self.settle()

    def settle(self) -> None:
        """Updates the orders with all recorded changes. Call it before reading an order; calling it
        after each change keeps the list short."""
        self._settle_nodes()
        for checkpoint in self.tree.changed_checkpoints:
            self._rank_checkpoint(checkpoint)
        self.tree.changed_checkpoints.clear()

    def _settle_nodes(self) -> None:
        """Updates the strays only. Checkpoints are ranked later, so that evicting a path ranks them
        once."""
        for node in self.tree.changed_nodes:
            self._rank(node)
            # Checkpoints with a tail own its page, whatever happens to the node's.
            at_end = node.checkpoints.get(b"")
            if at_end is not None and self.carriers is not self.states:
                self.tree.changed_checkpoints[at_end] = None
        self.tree.changed_nodes.clear()

    def allocate_pages(self, num: int) -> list[int]:
        """Returns `num` pages with one live reference each, and evicts as needed.

        The caller has checked that there is room. Strays are evicted before a free unit is split
        into pages, since a slot may need the whole unit.
        """
        while (missing := num - self.storage.num_loose_pages) > 0:
            if not self._evict_strays(missing):
                break
        while (missing := num - self._pages.num_free) > 0:
            if not self._evict_strays(missing):
                self._evict_victim(self.carriers, "pages")
        return self._pages.allocate(num)

    def allocate_slot(self) -> int:
        """Returns a slot with one live reference, and evicts if none is free. The caller has
        checked that there is room."""
        if isinstance(self.storage, UnifiedPool):
            self._free_unit(self.storage)
        elif not self._slots.num_free:
            self._evict_victim(self.states, "slots")
        (slot,) = self._slots.allocate(1)
        return slot

    def next_victim(self) -> tuple[Checkpoint, float] | None:
        """Returns the checkpoint that would be evicted for a slot, with its score; None if there is
        none."""
        self.settle()
        return self.states.victim()

    def claim(self, reservation: Reservation, checkpoint: Checkpoint | None) -> None:
        """Moves a waiting request's reservation to the checkpoint that it would resume from, or to
        none."""
        claimed = [c for c in (reservation.checkpoint, checkpoint) if c is not None]
        self.tree.changed_checkpoints.update(dict.fromkeys(claimed))
        reservation.move(checkpoint)

    def _rank(self, node: Node) -> None:
        """Updates the strays for a node whose children, checkpoints or pins have changed."""
        if not node.num_reaching and self._is_leaf(node):
            self.strays.setdefault(node)
        else:
            self.strays.pop(node, None)

    def _rank_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Updates the orders for one checkpoint."""
        is_kept = self.tree.at_slot.get(checkpoint.slot) is checkpoint
        if not is_kept or self._slots.live_refs(checkpoint.slot):
            self.states.discard(checkpoint)
            self.carriers.discard(checkpoint)
            return
        bucket, place = self.score.bucket(checkpoint)
        self.states.push(checkpoint, bucket, place)
        if self.carriers is self.states:
            return
        if self._carries_page(checkpoint):
            self.carriers.push(checkpoint, bucket, place)
        else:
            self.carriers.discard(checkpoint)

    def evict_checkpoint(self, checkpoint: Checkpoint, cause: str) -> None:
        """Evicts a checkpoint: its slot, tail page and window pages lose their cached references.
        `cause` is a key of `Stats.checkpoints_evicted`."""
        score = self.score.of(checkpoint)
        self.score.evicted(checkpoint)
        self.stats.evicted(cause, used=checkpoint.num_uses > 0)
        checkpoint.node.evicted_tail = checkpoint.tail
        for reservation in list(checkpoint.reservations):
            reservation.move(checkpoint.above)
        self.tree.detach(checkpoint, score)
        self._slots.drop(checkpoint.slot)
        for page in checkpoint.tail_pages:
            self._pages.drop(page)
        for page in checkpoint.windows:
            self._windows.drop(page)

    def evict_everything(self) -> None:
        """Evicts every checkpoint and page that no running request holds."""
        self.settle()
        for checkpoint in list(self.states):
            self.evict_checkpoint(checkpoint, "reset")
        while self._evict_strays(len(self.tree.nodes)):
            pass
        self.tree.outbox.cleared()

    def _carries_page(self, checkpoint: Checkpoint) -> bool:
        node, tail_page = checkpoint.node, checkpoint.tail_page
        if tail_page is not None and tail_page not in self.tree.at_page:
            return True
        return node.num_reaching == 1 and self._is_leaf(node)

    def _free_unit(self, unified: UnifiedPool) -> None:
        """Evicts what is worth least per byte until enough pages for a slot are free, and moves the
        remaining pages so that these form a unit."""
        while not self._slots.num_free:
            missing = unified.pages_a_slot - unified.num_loose_pages
            found = self._evict_strays(missing) if missing > 0 else self._clear_unit(unified)
            if not found:
                self._evict_victim(self.states, "slots")

    def _clear_unit(self, unified: UnifiedPool) -> bool:
        """Frees the unit with the fewest pages, none of them in use, by moving its pages elsewhere.
        Returns False if there is no such unit. Other units must have enough free pages."""
        unit = unified.unit_to_clear()
        if unit is None:
            return False
        for source, target in unified.make_way(unit):
            self.tree.move(source, target)
        return True

    def _score_per_page(self, checkpoint: Checkpoint) -> float:
        """Returns the score per page that the checkpoint's eviction frees: at once, as strays, or
        in place of its slot. A page that has come into use counts once its bucket is next looked
        at."""
        pages = self.storage.pages_a_slot or 1
        node = checkpoint.node
        is_used = not node.is_root and self._pages.live_refs(node.page)
        if not checkpoint.below and not is_used:
            pages += checkpoint.replay_tokens // self._page_size
        return self.score.of_page(checkpoint, pages)

    def _evict_victim(self, buckets: Buckets, cause: str) -> None:
        self.settle()
        found = buckets.victim()
        assert found is not None, "E1: what is cached can be reached through the buckets"
        self.evict_checkpoint(found[0], cause)

    def _evict_strays(self, num: int) -> bool:
        """Evicts the oldest stray, and then parents that become strays until `num` pages are free,
        so that a path goes in one piece. Returns False if there is no stray."""
        self._settle_nodes()
        if not self.strays:
            return False
        node, _ = self.strays.popitem(last=False)
        run = [node]
        for parent in islice(node.ancestors(), 1, None):
            if len(parent.children) > 1 or not self._is_bare(parent):
                break
            if len(run) == num:
                self.strays[parent] = None
                self.strays.move_to_end(parent, last=False)
                break
            run.append(parent)
        self.tree.remove(run)
        for gone in run:
            self._pages.drop(gone.page)
        self.stats.pages_evicted += len(run)
        return True

    def _is_leaf(self, node: Node) -> bool:
        """Whether only its checkpoints, if any, keep a page in the cache."""
        is_leaf = self.tree.leaves.get(node.page) is node
        return is_leaf and not self._pages.live_refs(node.page)

    def _is_bare(self, node: Node) -> bool:
        """Whether only its children keep a page in the cache."""
        return not (node.num_reaching or node.is_root or self._pages.live_refs(node.page))
