"""Checks every invariant of a cache from scratch, at the cost of a walk over everything.

The names (P1, T2 ...) are those of the cache's README.
"""

from __future__ import annotations

from collections import Counter

from milepost.cache.allocation import Allocation
from milepost.cache.cache import Cache
from milepost.cache.memory import Pool, UnifiedPool
from milepost.cache.plans import HOLE
from milepost.cache.tree import Checkpoint, Node, num_tokens


def check(cache: Cache) -> None:
    """Raise AssertionError on the first broken invariant."""
    checkpoints = _all_checkpoints(cache)
    _check_tree(cache)
    _check_reachability(cache)
    _check_checkpoints(cache, checkpoints)
    _check_allocations(cache)
    live, cached = _expected_pages(cache, checkpoints)
    _check_pool(cache.pages, live, cached)
    live, cached = _expected_slots(cache, checkpoints)
    _check_pool(cache.slots, live, cached)
    live, cached = _expected_windows(cache, checkpoints)
    _check_pool(cache.windows, live, cached)
    assert cache.windows.total == cache.windows.capacity, "P1: free + used + cached == total"
    _check_storage(cache)
    _check_orders(cache, checkpoints)


def _all_checkpoints(cache: Cache) -> list[Checkpoint]:
    nodes = [*cache.tree.roots.values(), *cache.tree.nodes.values()]
    return [checkpoint for node in nodes for checkpoint in node.checkpoints.values()]


def _check_tree(cache: Cache) -> None:
    children: Counter[Node] = Counter()
    for digest, node in cache.tree.nodes.items():
        assert node.digest == digest, "T1: a node is filed under its digest"
        assert cache.tree.at_page[node.page] is node, "T1: a node is filed under its page"
        parent = node.parent
        assert parent is not None, "T4: roots are filed apart"
        assert node.depth == parent.depth + 1, "T5: depth counts pages"
        home = cache.tree.roots if parent.is_root else cache.tree.nodes
        assert home.get(parent.digest) is parent, "T6: a resident page's parent is resident"
        children[parent] += 1
        assert parent.child(node.content) is node, "T10: a node knows its children by content"
    assert len(cache.tree.at_page) == len(cache.tree.nodes), "T1: a page has one node"
    for node in [*cache.tree.roots.values(), *cache.tree.nodes.values()]:
        assert len(node.children) == children[node], "T7: a node's children are resident"
        assert node.children == sorted(node.children, key=lambda n: n.content), "T10: in order"
        if len(node.children) == 1:
            assert node.last_child is node.children[0], "T10: an only child is the newest"
        assert not (node.is_root and not node.children and not node.checkpoints), (
            "T8: an empty root is pruned"
        )


def _check_reachability(cache: Cache) -> None:
    reaching: Counter[Node] = Counter()
    for node in sorted(cache.tree.nodes.values(), key=lambda n: -n.depth):
        assert node.num_reaching == len(node.checkpoints) + reaching[node], "T9: num_reaching"
        if node.num_reaching and node.parent is not None:
            reaching[node.parent] += 1
    for root in cache.tree.roots.values():
        assert root.num_reaching == len(root.checkpoints) + reaching[root], "T9: num_reaching"


def _check_checkpoints(cache: Cache, checkpoints: list[Checkpoint]) -> None:
    at_tail = {page: set(sharing) for page, sharing in cache.tree.at_tail.items()}
    pages = {c.tail_page for c in checkpoints if c.tail_page is not None}
    assert at_tail == {p: {c for c in checkpoints if c.tail_page == p} for p in pages}, "T1: tails"
    for checkpoint in checkpoints:
        inside = checkpoint.position - checkpoint.node.depth * cache.page_size
        assert 0 <= inside < cache.page_size, "C1: a checkpoint hangs on its last full page"
        assert num_tokens(checkpoint.tail) == inside, "C2: the tail holds the tokens past the node"
        assert (checkpoint.tail_page is None) == (inside == 0), "C3: a tail has its page"
        assert all(
            reservation.checkpoint is checkpoint for reservation in checkpoint.reservations
        ), "W1: a reservation hangs where it says"
    slots = [checkpoint.slot for checkpoint in checkpoints]
    outputs = [allocation.slot_out for allocation in cache.allocations if cache.slots_each]
    exports = [export.slot for allocation in cache.allocations for export in allocation.exports]
    set_aside = [slot for allocation in cache.allocations for slot in allocation.slots_kept]
    owners = slots + outputs + exports + set_aside
    assert len(set(owners)) == len(owners), "S5: a slot has one owner: a request or a checkpoint"


def _check_allocations(cache: Cache) -> None:
    for allocation in cache.allocations:
        for index, node in enumerate(allocation.path):
            assert cache.tree.nodes.get(node.digest) is node, "L1: an allocation's path is resident"
            assert node.digest == allocation.chain.digests(index + 1)[index], (
                "L2: path follows the chain"
            )
        _check_windows(cache, allocation)
        table = allocation.page_table
        assert len(set(table)) == len(table), "L3: a table names a page once"
        for page in table:
            assert cache.pages.live_refs(page), "L4: a live table's pages are used"
        positions = [export.position for export in allocation.exports]
        assert positions == sorted(
            p for p in positions if allocation.committed < p <= allocation.planned
        ), "A3: exports lie in the steps in flight"
        assert (
            allocation.state_length
            <= allocation.committed
            <= allocation.planned
            <= allocation.kv_length
        ), "A7: positions"
        assert allocation.is_in_flight == (allocation.num_steps > 0), "A5: running"
        source = allocation.source
        if source is not None:
            assert source.node.checkpoints.get(source.tail) is source, (
                "L5: what is read stays cached"
            )


def _expected_pages(
    cache: Cache, checkpoints: list[Checkpoint]
) -> tuple[Counter[int], Counter[int]]:
    live: Counter[int] = Counter()
    for allocation in cache.allocations:
        live.update(allocation.page_table)
        live.update(allocation.path_pins)
        if allocation.source is not None:
            live.update(allocation.source.tail_pages)
    lent = Counter(page for loan in cache.loans for page in loan.pages)
    assert lent == cache.loans._pages, "what is lent is what loans hold"
    live.update(lent)
    cached = Counter(node.page for node in cache.tree.nodes.values())
    cached.update(c.tail_page for c in checkpoints if c.tail_page is not None)
    return live, cached


def _check_windows(cache: Cache, allocation: Allocation) -> None:
    table, window, size = allocation.window_table, cache.config.window, cache.page_size
    if not window:
        assert not table, "O1: only windows have pages of their own"
        return
    first = max(allocation.state_length + 1 - window, 0) // size
    assert set(table[:first]) <= {HOLE}, "O2: nothing is held behind the window"
    assert HOLE not in table[first:], "O2: what is in the window is held"


def _expected_windows(
    cache: Cache, checkpoints: list[Checkpoint]
) -> tuple[Counter[int], Counter[int]]:
    live: Counter[int] = Counter()
    for allocation in cache.allocations:
        live.update(page for page in allocation.window_table if page != HOLE)
        if allocation.window_copy is not None:
            assert allocation.source is not None, "O5: what keeps a copied page is still read"
            assert allocation.window_copy.source in allocation.source.windows, "O5: and has it"
        live.update(allocation.loading_windows)
    for loan in cache.loans:
        kept = {checkpoint.slot: checkpoint.windows for checkpoint in checkpoints}
        assert loan.slot is None or kept[loan.slot] == loan.windows, "O4: what is lent is kept"
    window, size = cache.config.window, cache.page_size
    for checkpoint in checkpoints:
        position = checkpoint.position
        first = max(position + 1 - window, 0) // size
        num = -(-position // size) - first if window > 1 else 0
        assert len(checkpoint.windows) == num, "O3: a state has its window's pages and no others"
    return live, Counter(page for c in checkpoints for page in c.windows)


def _expected_slots(
    cache: Cache, checkpoints: list[Checkpoint]
) -> tuple[Counter[int], Counter[int]]:
    live: Counter[int] = Counter()
    for allocation in cache.allocations:
        if cache.slots_each:
            live[allocation.slot_out] += 1
        live.update(export.slot for export in allocation.exports)
        live.update(allocation.slots_kept)
        if allocation.source is not None:
            live[allocation.source.slot] += 1
    live.update(loan.slot for loan in cache.loans if loan.slot is not None)
    return live, Counter(checkpoint.slot for checkpoint in checkpoints)


def _check_pool(pool: Pool, live: Counter[int], cached: Counter[int]) -> None:
    for id_ in range(pool.first, pool.end):
        assert pool.live_refs(id_) == live.get(id_, 0), f"P2: live references of {id_}"
        assert pool.cached_refs(id_) == cached.get(id_, 0), f"P2: cached references of {id_}"
    assert pool.num_used == len(live), "P1: free + used + cached == total"
    num_cached = sum(id_ not in live for id_ in cached)
    assert pool.num_cached == num_cached, "P1: free + used + cached == total"


def _check_storage(cache: Cache) -> None:
    """U1 to U3, and P1 for what is free."""
    storage, pages, slots = cache.storage, cache.pages, cache.slots
    if not isinstance(storage, UnifiedPool):
        for pool in (pages, slots):
            assert pool.total == pool.end - pool.first, "P1: free + used + cached == total"
        return
    num_loose, free = 0, []
    for unit in range(1, storage.num_units + 1):
        ids = range(unit * storage.pages_a_slot, (unit + 1) * storage.pages_a_slot)
        num_held = sum(1 for page in ids if pages.live_refs(page) or pages.cached_refs(page))
        is_slot = bool(slots.live_refs(unit) or slots.cached_refs(unit))
        assert not (is_slot and num_held), "U1: a unit is a slot or pages"
        if not is_slot and not num_held:
            free.append(unit)
        elif num_held:
            num_loose += len(ids) - num_held
    held = storage.free_units.take(len(storage.free_units))
    storage.free_units.give(held[::-1])
    assert sorted(held) == free, "U2: a unit that holds nothing is free"
    assert storage.num_loose_pages == num_loose, "U3: free pages of other units are loose"


def _check_orders(cache: Cache, checkpoints: list[Checkpoint]) -> None:
    """E1: strays, carriers and states hold exactly what may be evicted."""
    expected = [
        node
        for node in cache.tree.nodes.values()
        if not (node.children or node.num_reaching or cache.pages.live_refs(node.page))
    ]
    orders = cache.reclaimer
    orders.settle()
    strays, carriers, states = orders.strays, orders.carriers, orders.states
    assert set(expected) == set(strays), "E1: strays"
    unread = [c for c in checkpoints if not cache.slots.live_refs(c.slot)]
    assert set(unread) == set(states), "E1: states"
    for checkpoint in unread:
        node, tail_page = checkpoint.node, checkpoint.tail_page
        leaf = not (node.is_root or node.children or cache.pages.live_refs(node.page))
        carries = leaf and len(node.checkpoints) == 1
        carries = carries or (tail_page is not None and tail_page not in cache.tree.at_page)
        carries = carries or cache.storage.pages_a_slot > 0
        assert carries == (checkpoint in carriers), "E1: carriers"
