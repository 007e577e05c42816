"""Connects ranks on CPUs, and the hosts of ranks on GPUs, through gloo.

Every rank adds up all ranks' values in rank order, so all hold the same bits. On a CPU the extra
traffic does not matter.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.errors import EngineDeadError
from milepost.kernels import norm
from milepost.kernels.layout.emit import values_of

HOST = "127.0.0.1"


def open_store(port: int, size: int, timeout_s: float, *, is_first: bool) -> dist.TCPStore:
    """Opens the store through which ranks find each other. The first rank hosts it, at a free port
    if `port` is 0."""
    # By itself it would listen on all of the machine's addresses, whatever its host's name.
    listening = socket.create_server((HOST, port)) if is_first else None
    return dist.TCPStore(
        HOST,
        port if listening is None else listening.getsockname()[1],
        size,
        is_master=is_first,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=None if listening is None else listening.detach(),
    )


class GlooLink:
    """A `Link` over gloo. A call that misses a rank for `timeout_s` raises EngineDeadError with the
    text of `why_lost`, which says what happened to the rank."""

    order = ""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        why_lost: Callable[[], str],
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's type stub lacks most of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=HOST)]
        self.rank, self.size, self.store = rank, size, store
        self._why_lost = why_lost
        self._group = gloo(dist.PrefixStore("gloo", store), rank, size, options)

    def all_reduce(self, values: Tensor) -> Tensor:
        first, *others = self._exchange(values)
        for other in others:
            first += other
        return first

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._exchange(values), -1)

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        delta = self.all_reduce(partials.sum(1))
        added, normed = norm.add_norm(hidden, delta, scale, eps, multiplier)
        return added, values_of(normed)

    def least(self, value: int) -> int:
        return min(int(each) for each in self._exchange(torch.tensor([value])))

    def gather(self, body: bytes) -> list[bytes]:
        sizes = [int(each) for each in self._exchange(torch.tensor([len(body)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        pairs = zip(self._exchange(padded), sizes, strict=True)
        return [each[:size].numpy().tobytes() for each, size in pairs]

    def wait_up_to(self, timeout_s: float) -> None:
        """Sets the longest wait for a rank in later calls."""
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def _exchange(self, values: Tensor) -> list[Tensor]:
        """Returns all ranks' values, in rank order."""
        sent = values.contiguous()
        found = [torch.empty_like(sent) for _ in range(self.size)]
        try:
            self._group.allgather([found], [sent]).wait()
        except RuntimeError as error:
            raise EngineDeadError(self._why_lost()) from error
        return found
