"""What fused kernels assume of strides: from a row's or a slot's place they go on element by
element, so a tensor that lies otherwise would be read wrongly without a word.
"""

from __future__ import annotations

from torch import Tensor


def check_rows(**tensors: Tensor | None) -> None:
    """Raise ValueError unless the last dimension of each tensor lies side by side."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: its last dimension has a stride of {tensor.stride(-1)}")


def check_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor is contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: it has strides of {tensor.stride()}, not contiguous ones")


def check_slots(**pools: Tensor) -> None:
    """Raise ValueError unless each slot of each pool [slots, ...] is contiguous; slots may lie
    apart."""
    for name, pool in pools.items():
        if len(pool) and not pool[0].is_contiguous():
            raise ValueError(f"{name}: a slot has strides of {pool.stride()[1:]}")
