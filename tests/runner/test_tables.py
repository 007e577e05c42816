"""Page tables on the host and on the device."""

from __future__ import annotations

import torch
from tests.runner.test_arrays import sequence

from milepost.runner import tables
from milepost.runner.tables import PageTables

CPU = torch.device("cpu")


def test_more_pages_than_one_copy_brings(monkeypatch):
    monkeypatch.setattr(tables, "PAGES_AT_ONCE", 4)
    both = PageTables(8, 16, CPU)
    sequences = [sequence(0, [1] * 450, 2), sequence(0, [1] * 130, 5), sequence(0, [1], 7)]
    both.bring(sequences)
    for each in sequences:
        held = both.on_device[each.slot_out, : len(each.page_table)]
        assert held.tolist() == each.page_table
    assert (both.on_device.numpy() == both.host.rows).all()
    sequences[1].page_table.append(99)
    both.bring(sequences)
    assert both.on_device[5, :4].tolist() == [50, 51, 52, 99]


def test_slots_cost_no_pinned_memory():
    sizes = {PageTables(num_slots, 16, CPU).num_pinned_bytes for num_slots in (8, 10_000)}
    assert len(sizes) == 1
    assert sizes.pop() < 1 << 23
