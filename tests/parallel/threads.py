"""Ranks that are threads of this process, so that what they add up to can be looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from milepost.kernels import norm
from milepost.parallel import Ranks

_TIMEOUT_S = 60


@dataclass
class Meeting:
    """Where so many threads meet, each with something in its hands."""

    size: int
    num_meetings: int = 0
    _held: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=_TIMEOUT_S)
        self._held = [None] * self.size

    def exchange(self, rank: int, value: object) -> list:
        """What all hold, in the order of their ranks."""
        self._held[rank] = value
        self._barrier.wait()
        all_held = list(self._held)
        if self._barrier.wait() == 0:
            self.num_meetings += 1
        return all_held

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class ThreadLink:
    """A `Link`."""

    meeting: Meeting
    rank: int
    order: str = ""

    def all_reduce(self, values: Tensor) -> Tensor:
        return sum(self.meeting.exchange(self.rank, values.clone()))

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, values), -1)

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_norm(hidden, self.all_reduce(partials.sum(1)), scale, eps, multiplier)

    def least(self, value: int) -> int:
        return min(self.meeting.exchange(self.rank, value))

    def gather(self, body: bytes) -> list[bytes]:
        return self.meeting.exchange(self.rank, body)


def run_ranks(size: int, work: Callable[[Ranks], Any], *, splits_experts: bool = False) -> list:
    """What `work` returns on each rank."""
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        link = ThreadLink(meeting, rank)
        try:
            return work(Ranks(rank=rank, size=size, link=link, splits_experts=splits_experts))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [each.result() for each in [threads.submit(one, rank) for rank in range(size)]]
