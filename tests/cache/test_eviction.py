"""The order of eviction against a sorted list. What checkpoints are worth: test_worth.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from milepost.cache.order import Order

ITEM = st.integers(0, 7)
OPERATION = st.tuples(st.sampled_from(["push", "discard"]), ITEM, st.integers(0, 3))


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
        else:
            order.discard(item)
            model.pop(item, None)
        assert len(order) == len(model)
        assert set(order) == set(model)
        if model:
            assert order.first() == min(model, key=model.__getitem__)
            assert order.last() == min(model, key=lambda item: (-model[item][0], model[item][1]))
