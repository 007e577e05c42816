"""Allocates CPU memory that reads as zeros and takes no room until it is written, and releases
it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64
"""Alignment in bytes of torch's tensors on a CPU."""


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Returns zeros [num_bytes] uint8; on a CPU they take no room until they are written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # torch.zeros would write all of them at once.
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes])


def drop(address: int, num_bytes: int) -> None:
    """Zeroes a range of memory by returning its whole pages to the system."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, start - address)
    ctypes.memset(end, 0, address + num_bytes - end)
    dropped = hasattr(mmap, "MADV_DONTNEED") and not ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED
    )
    if not dropped:
        ctypes.memset(start, 0, end - start)
