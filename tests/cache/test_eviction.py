"""The order of eviction against a sorted list. What checkpoints are worth: test_worth.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from milepost.cache.order import Order

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
