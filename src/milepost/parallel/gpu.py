"""Ranks on GPUs of one machine: few rows go through memory that all of them reach, in one launch
with the norm that reads their sum; more of them through NCCL. Both can be captured in graphs.

NCCL returns the same bits on all ranks, too: it adds up each piece on one of them.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from milepost.errors import ConfigError
from milepost.kernels import all_reduce, norm
from milepost.kernels.all_reduce import NUM_SLOTS, Mail
from milepost.parallel.gloo import GlooLink

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1800.0


class GpuLink:
    """A `Link` of this process's `device`, beside that of the `hosts`.

    torch has one group of ranks a process, and this is it. Raises ConfigError if there is one.
    """

    def __init__(self, hosts: GlooLink, device: torch.device) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size: this process has a process group of torch's already; end "
                "what uses it, or start this engine in a process of its own"
            )
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore("nccl", hosts.store),
            rank=hosts.rank,
            world_size=hosts.size,
            timeout=timedelta(seconds=_TIMEOUT_S),
            device_id=device,
        )
        self._hosts, self._device = hosts, device
        self._mails: dict[tuple[int, torch.dtype], Mail | None] = {}
        self._kept: list[Tensor] = []

    def all_reduce(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        mail = self._mail(values.shape[-1], values.dtype) if values.dim() == 2 else None
        if mail is not None and mail.holds(values):
            return all_reduce.add_up(values, mail)
        dist.all_reduce(values)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        num_rows, count = values.shape
        gathered = values.new_empty(self._hosts.size, num_rows, count)
        dist.all_gather_into_tensor(gathered, values.contiguous())
        return gathered.transpose(0, 1).reshape(num_rows, -1)

    def add_norm(
        self, hidden: Tensor, partials: Tensor, scale: Tensor, eps: float, multiplier: float
    ) -> tuple[Tensor, Tensor]:
        mail = self._mail(hidden.shape[-1], hidden.dtype)
        if mail is not None and mail.holds(hidden):
            return all_reduce.add_norm(hidden, partials, scale, eps, mail, multiplier)
        own = partials.squeeze(1) if partials.shape[1] == 1 else partials.sum(1)
        own = self.all_reduce(own.to(hidden.dtype))
        return norm.add_norm(hidden, own, scale, eps, multiplier)

    def least(self, value: int) -> int:
        return self._hosts.least(value)

    def close(self) -> None:
        """Let go of the group, whatever the other ranks are doing."""
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _mail(self, hidden_size: int, dtype: torch.dtype) -> Mail | None:
        """For rows of this size, made when the first of them come; None where no rank reaches the
        others' memory."""
        key = hidden_size, dtype
        if key not in self._mails:
            is_aligned = hidden_size * dtype.itemsize % 16 == 0
            self._mails[key] = self._open(hidden_size, dtype) if is_aligned else None
        return self._mails[key]

    def _open(self, hidden_size: int, dtype: torch.dtype) -> Mail | None:
        try:
            mail = self._share(hidden_size, dtype)
        except RuntimeError as error:
            mail = None
            logger.warning("GPUs do not reach each other's memory, so NCCL does all: %s", error)
        torch.cuda.synchronize(self._device)
        # All ranks' signals are zero before the first of them is set.
        return mail if self._hosts.least(int(mail is not None)) else None

    def _share(self, hidden_size: int, dtype: torch.dtype) -> Mail:
        size = self._hosts.size
        value_bytes = all_reduce.num_value_bytes(hidden_size, dtype)
        num_bytes = value_bytes + all_reduce.num_signal_bytes(size)
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device)
        memory.zero_()
        self._kept.append(memory)
        handle = symmetric.rendezvous(memory, dist.group.WORLD.group_name)
        addresses = [
            handle.get_buffer(rank, (num_bytes,), torch.uint8).data_ptr() for rank in range(size)
        ]
        values = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        return Mail(
            rank=self._hosts.rank,
            size=size,
            values=values,
            signals=values + value_bytes,
            turns=torch.zeros(NUM_SLOTS, dtype=torch.int32, device=self._device),
            dtype=dtype,
            hidden_size=hidden_size,
        )
