"""Turns what a request has computed into cached pages and checkpoints.

Adds nodes and checkpoints to the tree, and cached references to the pools, for pages and slots that
the request still holds.
"""

from __future__ import annotations

from milepost.cache.allocation.states import Allocation
from milepost.cache.allocation.windows import Windows
from milepost.cache.eviction import Reclaimer
from milepost.cache.placement import Kind
from milepost.cache.tree import Checkpoint, Node


class Publisher:
    """Publishes into the tree what lies in the pools."""

    def __init__(self, page_size: int, reclaimer: Reclaimer, windows: Windows | None) -> None:
        self._page_size = page_size
        self._windows = windows
        self._tree = reclaimer.tree
        self._pages = reclaimer.storage.pages
        self._slots = reclaimer.storage.slots
        self._stats = reclaimer.stats

    def publish_pages(self, allocation: Allocation) -> None:
        """Give each page that has become full its node; a page that another request published first
        stays ours.
        """
        chain, path = allocation.chain, allocation.path
        num_full = min(allocation.committed, chain.shared_end) // self._page_size
        if len(path) == num_full:
            return  # most often
        for digest in chain.digests(num_full)[len(path) : num_full]:
            known = self._tree.nodes.get(digest)
            if known is None:
                break
            self._join(allocation, known)
        pages = allocation.page_table[len(path) : num_full]
        if pages:
            parent = path[-1] if path else self._tree.root(chain)
            path.extend(self._tree.insert(chain, parent, pages))
            self._pages.keep(pages)

    def _join(self, allocation: Allocation, node: Node) -> None:
        """Follow a node that another request published; the page computed here stays our own."""
        self._pages.pin((node.page,))
        allocation.path_pins.append(node.page)
        self._stats.pages_duplicate += 1
        allocation.path.append(node)

    def publish_state(
        self, allocation: Allocation, position: int, slot: int, kind: Kind
    ) -> Checkpoint | None:
        """Turn a live slot into a checkpoint of the request's path; None, and it is given back, if
        the state is known already.
        """
        depth = position // self._page_size
        node = allocation.path[depth - 1] if depth else self._tree.root(allocation.chain)
        tail = allocation.chain.content(depth * self._page_size, position)
        if tail in node.checkpoints:
            self._slots.unpin((slot,))
            return None
        tail_page = allocation.page_table[depth] if tail else None
        if tail_page is not None:
            self._pages.keep((tail_page,))
        checkpoint = Checkpoint(
            position=position,
            slot=slot,
            node=node,
            kind=kind,
            tail=tail,
            tail_page=tail_page,
            end=allocation.end,
        )
        if self._windows is not None:
            checkpoint.windows = self._windows.keep(allocation, position)
        self._slots.keep((slot,))
        self._slots.unpin((slot,))
        self._tree.attach(checkpoint)
        self._stats.checkpoints_made += 1
        allocation.deepest_state = max(allocation.deepest_state, position)
        return checkpoint
