"""Ranks on GPUs, as far as it can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from milepost.parallel.gpu import GpuLink


@pytest.mark.parametrize("num_rows", [3, 0])
def test_what_ranks_have_stands_side_by_side(num_rows, monkeypatch):
    """Of a step in the middle of a prompt there is nothing, and no rank waits for another."""
    link = object.__new__(GpuLink)
    link._hosts = SimpleNamespace(size=2)
    own, other = torch.rand(2, num_rows, 4)

    def gather(into: torch.Tensor, values: torch.Tensor) -> None:
        assert num_rows
        into.copy_(torch.stack([values, other]))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    assert torch.equal(link.all_gather(own), torch.cat([own, other], 1))
