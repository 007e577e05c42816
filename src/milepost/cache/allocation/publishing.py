"""Turns what a request has computed into cached pages and checkpoints.

Adds nodes and checkpoints to the tree, and cached references in the pools, for pages and slots that
the request still holds.
"""

from __future__ import annotations

from milepost.cache.allocation.states import Allocation
from milepost.cache.allocation.windows import Windows
from milepost.cache.eviction import Reclaimer
from milepost.cache.placement import Kind
from milepost.cache.tree import Checkpoint


class Publisher:
    """Publishes the pages and states of running requests in the tree."""

    def __init__(self, page_size: int, reclaimer: Reclaimer, windows: Windows) -> None:
        self._page_size = page_size
        self._windows = windows
        self._tree = reclaimer.tree
        self._pages = reclaimer.storage.pages
        self._slots = reclaimer.storage.slots
        self._stats = reclaimer.stats

    def publish_pages(self, allocation: Allocation) -> None:
        """Adds a node for each page that has become full. If another request published an equal
        page first, its node is used, and the page computed here stays private."""
        chain, path = allocation.chain, allocation.path
        num_full = min(allocation.committed, chain.shared_end) // self._page_size
        if len(path) == num_full:
            return  # the usual case: no page has become full
        for digest in chain.digests(num_full)[len(path) : num_full]:
            known = self._tree.nodes.get(digest)
            if known is None:
                break
            self._pages.pin((known.page,))
            allocation.path_pins.append(known.page)
            path.append(known)
            self._stats.pages_duplicate += 1
        pages = allocation.page_table[len(path) : num_full]
        if pages:
            parent = path[-1] if path else self._tree.root(chain)
            path.extend(self._tree.insert(chain, parent, pages))
            self._pages.keep(pages)

    def publish_state(
        self, allocation: Allocation, position: int, slot: int, kind: Kind
    ) -> Checkpoint | None:
        """Turns a live slot into a checkpoint on the request's path. If the state is cached
        already, frees the slot and returns None."""
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
            windows=self._windows.keep(allocation, position),
        )
        self._slots.keep((slot,))
        self._slots.unpin((slot,))
        self._tree.attach(checkpoint)
        self._stats.checkpoints_made += 1
        allocation.deepest_state = max(allocation.deepest_state, position)
        return checkpoint
