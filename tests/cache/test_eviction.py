"""The order of eviction against a sorted list, and the scores that it is made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.cache import Cache
from milepost.cache.eviction import Order, is_fork, replay_tokens, surplus
from milepost.cache.placement import Kind
from milepost.cache.tree import NO_PAGE, Checkpoint, Node

ITEM = st.integers(0, 7)
OPERATION = st.one_of(
    st.tuples(st.just("push"), ITEM, st.integers(0, 3)),
    st.tuples(st.just("discard"), ITEM, st.just(0)),
    st.tuples(st.just("pop"), st.just(0), st.just(0)),
)


@given(st.lists(OPERATION, max_size=200))
def test_order_is_a_sorted_list(operations):
    """Smallest key first; of equal keys the one that has had it longest."""
    order: Order[int] = Order()
    model: dict[int, tuple[float, int]] = {}
    for serial, (verb, item, key) in enumerate(operations):
        if verb == "push":
            order.push(item, key)
            if item not in model or model[item][0] != key:
                model[item] = (key, serial)
        elif verb == "discard":
            order.discard(item)
            model.pop(item, None)
        else:
            expected = min(model, key=model.get, default=None)
            found = order.pop()
            assert found == (None if expected is None else (expected, model.pop(expected)[0]))
        assert len(order) == len(model)
        assert set(order) == set(model)
        assert all(item in order for item in model)


def test_order_forgets_what_is_outdated():
    """Pushing one item over and over takes no more room than one."""
    order: Order[str] = Order()
    order.push("other", 0.5)
    for key in range(100_000):
        order.push("item", key)
    assert len(order._heap) < 100
    assert [order.pop(), order.pop(), order.pop()] == [("other", 0.5), ("item", 99_999), None]


# --- scores ---------------------------------------------------------------------------------------


def chain_of(depths: list[int], page_size: int = 64) -> tuple[list[Node], list[Checkpoint]]:
    """A path of nodes with a checkpoint at the end of each of these pages."""
    nodes = [Node(b"root", NO_PAGE, None, b"")]
    for depth in range(1, max(depths) + 1):
        nodes.append(Node(bytes([depth]), depth, nodes[-1], bytes(4 * page_size)))
        nodes[-2].num_children = 1
    checkpoints = []
    for depth in depths:
        checkpoint = Checkpoint(
            position=depth * page_size,
            slot=depth,
            node=nodes[depth],
            kind=Kind.JUNCTION,
            tail=b"",
            tail_page=None,
        )
        nodes[depth].checkpoints = {b"": checkpoint}
        checkpoints.append(checkpoint)
    return nodes, checkpoints


def test_replay_goes_back_to_the_checkpoint_before():
    _, checkpoints = chain_of([2, 3, 7])
    assert [replay_tokens(each) for each in checkpoints] == [128, 64, 256]


def test_replay_counts_a_tail_only_on_the_same_continuation():
    nodes, (deep,) = chain_of([4])
    for tail, position in ((b"\0" * 40, 138), (b"\1" * 80, 148)):
        nodes[2].checkpoints = dict(nodes[2].checkpoints) | {
            tail: Checkpoint(
                position=position, slot=9, node=nodes[2], kind="", tail=tail, tail_page=5
            )
        }
    assert replay_tokens(deep) == 256 - 138


def test_fork():
    nodes, _ = chain_of([2])
    assert not is_fork(nodes[1])
    nodes[1].num_children = 2
    assert is_fork(nodes[1])


@pytest.mark.parametrize(
    ("depths", "cap", "dropped"),
    [
        ([1, 2, 3], 3, None),
        ([4, 5, 9], 2, 5),
        ([1, 5, 9], 2, 1),
        ([3, 6, 9, 10], 3, 3),
        ([8, 9], 1, 8),
    ],
)
def test_surplus_is_the_cheapest_but_never_the_deepest(depths, cap, dropped):
    """Of equally cheap ones the shallowest."""
    _, checkpoints = chain_of(depths)
    extra = surplus(checkpoints, cap)
    assert (extra and extra.position) == (dropped and dropped * 64)


def test_surplus_spares_marks_and_forks():
    nodes, checkpoints = chain_of([1, 2, 3, 9])
    checkpoints[0].kind = Kind.MARK
    nodes[2].num_children = 2
    assert surplus(checkpoints, 2) is checkpoints[2]
    nodes[3].num_children = 2
    assert surplus(checkpoints, 2) is None


def test_states_on_a_path_are_capped():
    """A long chat keeps no more than the cap, and always its end."""
    cache = Cache(num_pages=200, num_slots=50)
    tokens = list(range(10))
    for turn in range(20):
        tokens += range(turn, turn + 100)
        chain = cache.chain(tokens)
        lease = cache.admit(chain, cache.match(chain))
        exports = cache.take_exports(lease, len(tokens))
        written = {export.slot: export.position for export in exports}
        cache.commit(lease, len(tokens), {lease.slot_out: len(tokens)} | written)
        cache.release(lease, Kind.ANSWER_END)
    path = cache.match(cache.chain([*tokens, 1])).path
    assert len(path.checkpoints()) == 4
    assert path.checkpoints()[-1].position == len(tokens)
    assert cache.stats.checkpoints_evicted["cap"] > 10
