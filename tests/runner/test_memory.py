"""What the pools may take of a device's memory."""

from __future__ import annotations

import pytest
import torch

from milepost.runner.memory import GIB, free_bytes

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 GiB, of which 70 are free."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70 * GIB, 100 * GIB))


def test_pools_leave_room_for_the_largest_step_and_for_graphs(gpu):
    def of(activations: int) -> int:
        return free_bytes(CUDA, utilization=0.9, activations=activations, cpu_cache_gib=1.0)

    assert of(0) == int(60 * GIB) - GIB // 4
    # What a step takes, and a quarter of that for graphs.
    assert of(0) - of(8 * GIB) == 10 * GIB


def test_a_lower_utilization_leaves_so_much_more_of_the_whole(gpu):
    high, low = (
        free_bytes(CUDA, utilization=share, activations=0, cpu_cache_gib=1.0)
        for share in (0.75, 0.5)
    )
    assert high - low == 25 * GIB


def test_a_cpu_takes_what_was_asked_for():
    cpu = torch.device("cpu")
    assert free_bytes(cpu, utilization=0.9, activations=GIB, cpu_cache_gib=1.5) == 3 * GIB // 2
