"""Where hidden states are read and carried to, worked out on the host.

Legend: T tokens, S sequences, W states to be carried, T and S of a capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from milepost.kernels.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryRows:
    """int32 arrays: in numpy where they are to be sent to a device, else tensors."""

    sources: Any
    """[T]: the slot that carries the state before a token; -1 where it is that behind the token
    ahead of it in the batch."""
    targets: Any
    """[W, 2]: the token behind which a state is carried on, and the slot that carries it; -1 and -1
    for padding."""


def lay_out(batch: Batch) -> CarryRows:
    """Of a step; reads slots before it writes them."""
    ends = batch.lengths.cumsum()
    firsts = ends - batch.lengths
    sources = np.full(batch.capacity.num_tokens, -1, np.int32)
    sources[firsts] = batch.slot_in
    exported = [
        (firsts[index] + position - batch.starts[index] - 1, slot)
        for index, position, slot in batch.exports
    ]
    own = np.stack((ends - 1, batch.slot_out), 1)
    written = np.concatenate((own, np.array(exported, np.int64).reshape(-1, 2)))
    capacity = batch.capacity
    most = len(written) if capacity.is_exact else capacity.num_sequences + capacity.num_exports
    targets = np.full((most, 2), -1, np.int32)
    targets[: len(written)] = written
    if batch.chip is not None:
        return CarryRows(sources=sources, targets=targets)
    return CarryRows(sources=_on(batch, sources), targets=_on(batch, targets))


def _on(batch: Batch, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(batch.device)
