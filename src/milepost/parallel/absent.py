"""The first of several ranks without the others. Its steps are sized and compiled without GPUs, on
torch's device `meta`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.parallel.gpu import CanAccess, GpuLink
from milepost.parallel.ranks import Ranks

META = torch.device("meta")


def first_of(size: int, *, splits_experts: bool = False, batch_invariant: bool = False) -> Ranks:
    """Returns the first of `size` ranks, whose memory the others could reach if it had any."""
    link = None
    if size > 1:
        link = _AbsentLink(_AbsentHosts(size=size), META, batch_invariant=batch_invariant)
    return Ranks(size=size, link=link, splits_experts=splits_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AbsentHosts:
    """Hosts that agree with the first rank."""

    size: int
    rank: int = 0

    @property
    def store(self) -> dist.Store:
        raise AssertionError("nobody is there to share a store with")

    def least(self, value: int) -> int:
        return value

    def gather(self, body: bytes) -> list[bytes]:
        return [body] * self.size


class _AbsentLink(GpuLink):
    """A link that allocates what a real one does, and sends nothing."""

    def _open_group(self) -> None:
        pass

    def _agree_on_reach(self, can_access: CanAccess) -> bool:
        del can_access
        return True

    def _sum(self, values: Tensor) -> None:
        pass

    def _gather(self, gathered: Tensor, values: Tensor) -> None:
        pass

    def _share(
        self, value_bytes: int, signal_bytes: int, num_turns: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        memory = torch.empty(value_bytes + signal_bytes, dtype=torch.uint8, device=META)
        self._kept.append(memory)
        addresses = torch.empty(self._hosts.size, dtype=torch.int64, device=META)
        return addresses, addresses, torch.empty(num_turns, dtype=torch.int32, device=META)
