"""Host memory that a GPU's driver pins, with a driver that writes down what it is asked."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from milepost.tiers import arena
from milepost.tiers.arena import Arena, ItemTensors, allocate_host


class Driver:
    """Refuses what it has pinned already, as CUDA does, and if told so anything."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert not flags, "nothing is shared with other contexts"
        if self.refuses or address in self.pinned:
            return 712
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    yield made
    gc.collect()


def memory() -> Arena:
    """As pools on a device are."""
    return Arena(
        pages=ItemTensors(tensors=(torch.zeros(4, 64),)),
        states=ItemTensors(tensors=(torch.zeros(2, 256),)),
    )


def test_memory_is_pinned_for_as_long_as_it_lives(driver: Driver) -> None:
    """What an engine leaves pinned, the next one of the process cannot pin if it lies there."""
    host = allocate_host(memory(), 3, 2, is_pinned=True)
    pages = host.pages
    assert len(driver.pinned) == 1
    del host
    gc.collect()
    assert len(driver.pinned) == 1
    pages.tensors[0].fill_(1.0)
    del pages
    gc.collect()
    assert not driver.pinned


def test_a_refusal_is_named_and_leaves_no_error_behind(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime would hand its error to the next step that asks for one."""
    cleared: list[bool] = []
    monkeypatch.setattr(arena, "_clear_error", lambda: cleared.append(True))
    driver.refuses = True
    with pytest.raises(MemoryError, match=r"GiB .* pinned: error 712; lower cache_host_gib"):
        allocate_host(memory(), 3, 2, is_pinned=True)
    assert cleared


def test_more_than_the_system_has_is_refused_in_gib() -> None:
    with pytest.raises(
        MemoryError, match=r"^\d{6,}\.\d GiB of host memory: .*; lower cache_host_gib"
    ):
        allocate_host(memory(), 2**45, 1, is_pinned=False)
