"""Page tables on the host and on the device."""

from __future__ import annotations

import pytest
import torch
from tests.runner.test_arrays import sequence, steps

from milepost.runner import tables
from milepost.runner.tables import HostTables, PageTables

CPU = torch.device("cpu")


def test_tables_bring_only_new_pages():
    held = HostTables(8, max_pages=16, page_size=64)
    indices, pages = held.update(steps(sequence(0, [1] * 100, 2)))
    assert (indices.tolist(), pages.tolist()) == ([16, 17], [20, 21])
    assert not len(held.update(steps(sequence(100, [1], 2, new_pages=())))[0])
    indices, pages = held.update(steps(sequence(128, [1], 2, new_pages=(29,))))
    assert (indices.tolist(), pages.tolist()) == ([18], [29])


def test_a_table_that_has_ended_begins_anew():
    """Also in the very plan that ends it; a table that is not known may be ended too."""
    held = HostTables(2, max_pages=4, page_size=64)
    held.update(steps(sequence(0, [1] * 200, 5), sequence(0, [1], 6)))
    again = steps(sequence(0, [1] * 70, 5, new_pages=(4, 5)), ended=(5, 9))
    indices, pages = held.update(again)
    assert (indices.tolist(), pages.tolist()) == ([4, 5], [4, 5])
    assert held.rows[1].tolist() == [4, 5, 52, 53], "what is stale may stay"
    held.update(steps(sequence(0, [1], 7), ended=(6,)))
    assert held.places(steps(sequence(0, [1], 7), again.sequences[0]).sequences) == [2, 1]


def test_a_table_that_does_not_cover_the_step_is_refused():
    held = HostTables(2, max_pages=4, page_size=64)
    held.update(steps(sequence(0, [1] * 64, 5)))
    with pytest.raises(AssertionError, match="T1"):
        held.update(steps(sequence(64, [1], 5, new_pages=())))


def test_more_pages_than_the_longest_sequence_has_are_refused():
    """They would be another's."""
    held = HostTables(2, max_pages=4, page_size=64)
    with pytest.raises(AssertionError, match="T2"):
        held.update(steps(sequence(0, [1] * 300, 5)))


def test_more_pages_than_one_copy_brings(monkeypatch):
    monkeypatch.setattr(tables, "PAGES_AT_ONCE", 4)
    both = PageTables(8, 16, 64, CPU)
    sequences = [sequence(0, [1] * 450, 2), sequence(0, [1] * 130, 5), sequence(0, [1], 7)]
    both.send(both.host.follow(steps(*sequences)))
    for each, place in zip(sequences, both.host.places(sequences), strict=True):
        held = both.on_device[place, : len(each.new_pages)]
        assert tuple(held.tolist()) == each.new_pages
    assert (both.on_device.numpy() == both.host.rows).all()
    both.send(both.host.follow(steps(sequence(192, [1], 5, new_pages=(99,)))))
    (place,) = both.host.places(sequences[1:2])
    assert both.on_device[place, :4].tolist() == [50, 51, 52, 99]


def test_requests_cost_no_pinned_memory():
    sizes = {PageTables(num, 16, 64, CPU).num_pinned_bytes for num in (8, 10_000)}
    assert len(sizes) == 1
    assert sizes.pop() < 1 << 23
