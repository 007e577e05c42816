"""Connects ranks on GPUs of one machine. An all-reduce goes through memory that all ranks can
access, in one launch together with the norm that reads its result. Sums of many rows that no norm
reads go through NCCL. So do all sums if a GPU cannot access another's memory: then over PCIe or
through pinned host memory, whichever NCCL finds. All can be captured in graphs.

NCCL also returns the same bits on all ranks, since it adds up each piece on one of them. But which
one, and so the order of the sum, depends on the size. With `batch_invariant` it only gathers the
ranks' values, and each rank adds them up in rank order, as the kernels do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from milepost.errors import ConfigError
from milepost.kernels import comm, norm
from milepost.kernels.comm import NUM_SLOTS, RankBuffers, add_up
from milepost.kernels.layout.emit import values_of
from milepost.kernels.platform.tables import SumOrder

logger = logging.getLogger(__name__)

_ABORT_S = 5.0
_TIMEOUT_S = 1800.0

CanAccess = Callable[[int, int], bool]
"""Whether a GPU can access the memory of another, by their indices."""


def why_apart(first: int, size: int, can_access: CanAccess) -> str:
    """Returns which of `size` GPUs, from index `first` on, cannot access another's memory; empty if
    all can."""
    pairs = permutations(range(first, first + size), 2)
    apart = [
        f"{device} that of {other}" for device, other in pairs if not can_access(device, other)
    ]
    if not apart:
        return ""
    more = f", and {len(apart) - 1} more pairs" if len(apart) > 1 else ""
    return f"GPU {apart[0]}{more}"


class Hosts(Protocol):
    """The link between the hosts of GPUs, as far as the GPUs' own link needs it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def store(self) -> dist.Store:
        """The store through which ranks find each other."""
        ...

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values: see `Link.least`."""
        ...

    def gather(self, body: bytes) -> list[bytes]:
        """Returns the bytes from each rank: see `Link.gather`."""
        ...


class GpuLink:
    """A `Link` of this process's `device`, next to the link of the `hosts`.

    torch allows one default process group per process, and this link takes it. Raises ConfigError
    if there is one already. With `batch_invariant` sums have one order for any number of rows.
    """

    def __init__(
        self,
        hosts: Hosts,
        device: torch.device,
        can_access: CanAccess = torch.cuda.can_device_access_peer,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._hosts, self._device = hosts, device
        self._sum_order = SumOrder.FIXED if batch_invariant else SumOrder.FREE
        self._open_group()
        self._reaches = self._agree_on_reach(can_access)
        # Imported here because triton need not be installed on machines without a GPU.
        from milepost.kernels.comm import one_shot, two_shot

        self._one_shot, self._two_shot = one_shot, two_shot
        self._mails: dict[tuple[int, torch.dtype], RankBuffers | None] = {}
        self._boxes: dict[tuple[int, torch.dtype], RankBuffers | None] = {}
        self._kept: list[Tensor] = []
        self._waits: list[tuple[Tensor, Tensor]] = []
        """Signals that launches on this rank wait for, each with the turns it has reached."""
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def all_reduce(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        mail = self._mail(values.shape[-1], values.dtype) if values.dim() == 2 else None
        if mail is not None and mail.holds(values):
            return self._one_shot.add_up(values, mail)
        if self._sum_order.is_fixed:
            gathered = values.new_empty(self._hosts.size, *values.shape)
            self._gather(gathered, values)
            return add_up(gathered.unbind())
        self._sum(values)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        (num_rows, count), size = values.shape, self._hosts.size
        gathered = values.new_empty(size, num_rows, count)
        if num_rows:  # a step in the middle of a prompt samples nothing
            self._gather(gathered, values.contiguous())
        return gathered.transpose(0, 1).reshape(num_rows, size * count)

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        mail = self._mail(hidden.shape[-1], hidden.dtype)
        if mail is not None and mail.holds(hidden):
            return self._one_shot.add_norm(hidden, partials, scale, eps, mail, multiplier)
        boxes = None if mail is None else self._boxes_for(hidden)
        if boxes is not None and boxes.holds(hidden):
            return self._two_shot.share_norm(hidden, partials, scale, eps, boxes, multiplier)
        delta = partials.squeeze(1) if partials.shape[1] == 1 else partials.sum(1)
        delta = self.all_reduce(delta.to(hidden.dtype))
        added, normed = norm.add_norm(hidden, delta, scale, eps, multiplier, order=self._sum_order)
        return added, values_of(normed)

    @property
    def order(self) -> str:
        """Names how sums are made: the kernels add to the residual stream before they round, and
        norm with fewer threads."""
        return "by kernels" if any(self._mails.values()) else "gathered"

    def least(self, value: int) -> int:
        return self._hosts.least(value)

    def gather(self, body: bytes) -> list[bytes]:
        return self._hosts.gather(body)

    def release(self) -> None:
        """Unblocks device work that waits for a lost rank; it continues with incomplete data.
        Called from another thread than the one that waits."""
        torch.cuda.set_device(self._device)
        # Copies on a stream of their own: the waiting work may leave no room for a kernel.
        with torch.cuda.stream(self._aside):
            for signals, turns in self._waits:
                signals.copy_(torch.full_like(signals, far_behind(turns.cpu()), device="cpu"))
        self.close()

    def close(self) -> None:
        """Aborts the process group, whatever the other ranks are doing. NCCL waits until no CUDA
        graph holds its operations any more; if some do for long, the group is left as it is."""
        if not dist.is_initialized():
            return
        abort = threading.Thread(
            target=dist.distributed_c10d._abort_process_group, name="abort", daemon=True
        )
        abort.start()
        abort.join(_ABORT_S)
        if abort.is_alive():
            logger.warning("NCCL has not ended within %g seconds, and is left as it is", _ABORT_S)

    def _open_group(self) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size: this process has a process group of torch's already; end "
                "what uses it, or start this engine in a process of its own"
            )
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore("nccl", self._hosts.store),
            rank=self._hosts.rank,
            world_size=self._hosts.size,
            timeout=timedelta(seconds=_TIMEOUT_S),
            device_id=self._device,
        )

    def _agree_on_reach(self, can_access: CanAccess) -> bool:
        """Whether all ranks access the memory of all others. The first one says so in the log."""
        first = (self._device.index or 0) - self._hosts.rank
        why = why_apart(first, self._hosts.size, can_access)
        reaches = bool(self._hosts.least(int(not why)))
        if self._hosts.rank == 0 and reaches:
            logger.info("GPUs access each other's memory: all-reduces go through it")
        elif self._hosts.rank == 0:
            logger.warning(
                "GPUs do not access each other's memory (%s): NCCL does all all-reduces, through "
                "host memory if it must, and steps of several GPUs take longer",
                why or "another rank says so",
            )
        return reaches

    def _sum(self, values: Tensor) -> None:
        dist.all_reduce(values)

    def _gather(self, gathered: Tensor, values: Tensor) -> None:
        dist.all_gather_into_tensor(gathered, values)

    def _mail(self, hidden_size: int, dtype: torch.dtype) -> RankBuffers | None:
        """Returns the one-shot buffers for rows of `hidden_size`, made at first use; None if some
        rank cannot reach the others' memory."""
        key, size = (hidden_size, dtype), self._hosts.size
        if key not in self._mails:
            is_aligned = hidden_size * dtype.itemsize % 16 == 0
            sizes = comm.one_shot_bytes(hidden_size, dtype, size)
            found = self._share(*sizes, num_turns=NUM_SLOTS) if is_aligned else None
            num_rows = comm.one_shot_rows(size)
            self._mails[key] = found and self._buffers(found, hidden_size, num_rows)
        return self._mails[key]

    def _boxes_for(self, hidden: Tensor) -> RankBuffers | None:
        """Returns the two-shot buffers for many rows, or None like `_mail`. The first call must
        have the most rows."""
        (count, hidden_size), dtype, size = hidden.shape, hidden.dtype, self._hosts.size
        key = hidden_size, dtype
        if key not in self._boxes:
            num_rows = -(-count // size)
            sizes = comm.two_shot_bytes(num_rows, hidden_size, dtype, size)
            found = self._share(*sizes, num_turns=num_rows)
            self._boxes[key] = found and self._buffers(found, hidden_size, num_rows * size)
        return self._boxes[key]

    def _buffers(
        self, found: tuple[Tensor, Tensor, Tensor], hidden_size: int, num_rows: int
    ) -> RankBuffers:
        values, signals, turns = found
        return RankBuffers(
            rank=self._hosts.rank,
            size=self._hosts.size,
            values=values,
            signals=signals,
            turns=turns,
            hidden_size=hidden_size,
            num_rows=num_rows,
        )

    def _share(
        self, value_bytes: int, signal_bytes: int, num_turns: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Allocates memory that all ranks reach. Returns the addresses [R] of every rank's values
        and signals, and `num_turns` turns, all zero at first; None if any rank could not allocate
        it."""
        if not self._reaches:
            return None
        found = None
        try:
            found = self._rendezvous(value_bytes + signal_bytes)
        except RuntimeError as error:
            logger.warning("GPUs do not reach each other's memory, so NCCL does all: %s", error)
        turns = torch.zeros(num_turns, dtype=torch.int32, device=self._device)
        torch.cuda.synchronize(self._device)
        # All ranks' signals are zero before any of them is set.
        if not self._hosts.least(int(found is not None)) or found is None:
            return None
        self._waits.append((self._kept[-1][value_bytes:].view(torch.int32), turns))
        return found, found + value_bytes, turns

    def _rendezvous(self, num_bytes: int) -> Tensor:
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device)
        memory.zero_()
        self._kept.append(memory)
        world = dist.group.WORLD
        assert world is not None, "the group is opened first"
        handle = symmetric.rendezvous(memory, world.group_name)
        addresses = [
            handle.get_buffer(rank, (num_bytes,), torch.uint8).data_ptr()
            for rank in range(self._hosts.size)
        ]
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)


def far_behind(turns: Tensor) -> int:
    """Returns a signal value that satisfies every wait for these turns, and for some later ones."""
    return (int(turns.max()) + 2**29 + 2**31) % 2**32 - 2**31
