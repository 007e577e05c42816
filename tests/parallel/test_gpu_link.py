"""Ranks on GPUs, as far as it can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from milepost.parallel import Ranks
from milepost.parallel.gpu import GpuLink, why_apart


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


class Hosts:
    """Hosts of two ranks; `least` answers as the other rank says."""

    store = None
    rank, size = 0, 2

    def __init__(self, other: int = 1) -> None:
        self.other = other

    def least(self, value: int) -> int:
        return min(value, self.other)


class Link(GpuLink):
    """A link without a process group, whose sums are noted."""

    def _open_group(self) -> None:
        self.sums: list[tuple[int, ...]] = []

    def _sum(self, values: torch.Tensor) -> None:
        self.sums.append(tuple(values.shape))
        values *= 2  # the other rank has the same

    def _rendezvous(self, num_bytes: int) -> torch.Tensor:
        raise AssertionError(f"{num_bytes} bytes are shared, although nobody reaches them")


@pytest.fixture
def apart() -> Link:
    pytest.importorskip("triton", reason="a link has kernels in triton")
    return Link(Hosts(), torch.device("cpu"), can_access=lambda *_: False)


def test_in_the_bitwise_mode_ranks_are_added_up_in_their_order():
    """Of three numbers the order of the sum can be seen; NCCL would choose one by their number."""
    pytest.importorskip("triton", reason="a link has kernels in triton")

    class Ordered(Link):
        def _gather(self, gathered: torch.Tensor, values: torch.Tensor) -> None:
            gathered.copy_(torch.stack([1e8 * values, -1e8 * values, values]))

    hosts = Hosts()
    hosts.size = 3
    reach = {"can_access": lambda *_: False}
    link = Ordered(hosts, torch.device("cpu"), **reach, batch_invariant=True)
    ones, partials = torch.ones(1000, 64), torch.ones(1000, 1, 64)
    assert torch.equal(link.all_reduce(ones.clone()), ones)
    added, _ = link.add_norm(ones, partials, torch.ones(64), 1e-6, 1.0)
    assert torch.equal(added, 2 * ones)
    assert link.order == "gathered"
    assert link.sums == []


def test_every_pair_is_asked():
    asked = []
    assert not why_apart(2, 3, lambda *pair: not asked.append(pair))
    assert asked == [(2, 3), (2, 4), (3, 2), (3, 4), (4, 2), (4, 3)]
    assert why_apart(0, 2, lambda own, _: own == 0) == "GPU 1 that of 0"
    assert why_apart(0, 3, lambda *_: False) == "GPU 0 that of 1, and 5 more pairs"


def test_without_access_nccl_does_all_sums_and_shares_no_memory(apart):
    values = torch.rand(3, 64)
    assert torch.equal(apart.all_reduce(values.clone()), 2 * values)
    hidden, scale = torch.rand(3, 64), torch.rand(64)
    partials = torch.rand(3, 2, 64)
    added, normed = apart.add_norm(hidden, partials, scale, 1e-6, 1.0)
    assert torch.allclose(added, hidden + 2 * partials.sum(1))
    expected = added * scale / (added.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(normed, expected, atol=1e-5)
    assert apart.sums == [(3, 64), (3, 64)]


@pytest.mark.parametrize(("own", "other"), [(True, 1), (False, 1), (True, 0)])
def test_the_first_rank_says_which_way_sums_go(own, other, caplog):
    pytest.importorskip("triton", reason="a link has kernels in triton")
    caplog.set_level("INFO")
    link = Link(Hosts(other), torch.device("cpu"), can_access=lambda *_: own)
    assert Ranks(size=2, link=link).least(1) == other
    if own and other:
        assert "GPUs access each other's memory" in caplog.text
    else:
        why = "another rank says so" if own else "GPU 0 that of 1, and 1 more pairs"
        assert f"do not access each other's memory ({why}): NCCL does all" in caplog.text
