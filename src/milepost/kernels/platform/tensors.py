"""Number types and strides of the tensors that kernels take, slots of pools, and two functions of
whole numbers, without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""
INT8_MAX = 127.0
"""Largest integer that activations are rounded to. Half of the range, 127.5, which
compressed-tensors divides by in Python, would put a row's largest number on the bound between two
integers, where its last bit decides."""
BLOCK = 128
"""Inputs that share a scale, of weights and of activations, in the published block format."""
LEAST_SCALE = 1e-12
"""Smallest scale of activations, so that all zeros are not divided by zero."""
ROW_BLOCK = 16
"""Rows that torch computes at a time where bits must not depend on the number of rows."""

Made = TypeVar("Made", Tensor, tuple[Tensor, ...])


def round_fp8(values: Tensor) -> Tensor:
    """Rounds to the nearest FP8 value, ties to even; larger values become the largest."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of intermediate sums: float32, or float64 if the inputs are float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_apart(like: Tensor, *shape: int) -> Tensor:
    """Returns an empty tensor [..., rows, columns] with a gap between rows. Torch computes such
    rows one by one, so an element's bits do not depend on the other rows."""
    return like.new_empty(*shape[:-1], shape[-1] + 1)[..., :-1]


def in_blocks(compute: Callable[..., Made], *rows: Tensor, size: int = ROW_BLOCK) -> Made:
    """Returns `compute(*rows)` of `rows` [T, ...], computed `size` rows at a time. Libraries choose
    their order of sums by the number of rows, on which a row's bits would depend otherwise. The
    last block is filled up with zeros."""
    num_rows = len(rows[0])
    missing = -num_rows % size if num_rows else size
    padded = (torch.cat((each, each.new_zeros(missing, *each.shape[1:]))) for each in rows)
    parts = [compute(*block) for block in zip(*(each.split(size) for each in padded), strict=True)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[:num_rows]
    return tuple(torch.cat(each)[:num_rows] for each in zip(*parts, strict=True))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor.to(dtype)`, cheaper if that changes nothing: a step asks a hundred times."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def parts_of(delta: Tensor | None) -> tuple[int, int, int]:
    """Returns the number of partials in `delta` [T, C] or [T, P, C], 0 for None, and its strides
    from row to row and from part to part."""
    if delta is None:
        return 0, 0, 0
    if delta.dim() == 2:
        return 1, delta.stride(0), 0
    rows, parts, _ = delta.stride()
    return delta.shape[1], rows, parts


# Kernels step through a row or slot element by element: any other layout would be misread silently.


def check_rows(**tensors: Tensor | None) -> None:
    """Raises ValueError unless the last dimension of each tensor has a stride of 1."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: its last dimension has a stride of {tensor.stride(-1)}")


def check_contiguous(**tensors: Tensor) -> None:
    """Raises ValueError unless each tensor is contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: it has strides of {tensor.stride()}, not contiguous ones")


def check_slots(**pools: Tensor) -> None:
    """Raises ValueError unless each slot of each pool [slots, ...] is contiguous; slots need not be
    adjacent."""
    for name, pool in pools.items():
        if len(pool) and not pool[0].is_contiguous():
            raise ValueError(f"{name}: a slot has strides of {pool.stride()[1:]}")


_WIDEST = torch.complex128
"""torch's index_copy_ on a CPU copies element by element: elements of 16 bytes are three times as
fast as those of 4."""


def read_slots(pool: Tensor, slot_in: Tensor, slot_out: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the states at `slot_in` [S], as `dtype`, to be changed and then written to `slot_out`
    [S].

    They are contiguous. On a CPU they share the pool's memory if each state is written where it was
    read and the slots are consecutive, as those of requests that came together are.
    """
    if pool.device.type == "cpu" and pool.dtype == dtype:
        places = slot_out.tolist()
        if places == list(range(places[0], places[0] + len(places))) == slot_in.tolist():
            states = pool[places[0] : places[0] + len(places)]
            if states.is_contiguous():
                return states
    return pool.index_select(0, slot_in).to(dtype)


def write_slots(pool: Tensor, slot_out: Tensor, states: Tensor) -> None:
    """Does `pool[slot_out] = states`. `slot_out` [S] are all different; `states` [S, ...] have any
    float type, or are what `read_slots` returned for these slots."""
    if states.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr():
        return
    states = states.to(pool.dtype)
    rows, sources = pool.flatten(1), states.flatten(1)
    if pool.device.type == "cpu" and rows.shape[1] * pool.itemsize % _WIDEST.itemsize == 0:
        rows, sources = rows.view(_WIDEST), sources.contiguous().view(_WIDEST)
    rows.index_copy_(0, slot_out, sources)


def cdiv(number: int, divisor: int) -> int:
    """Returns the quotient, rounded up. (Triton's own cdiv takes as long as a small allocation on
    the host.)"""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the least power of two that is no less than a positive `number`."""
    return 1 << (number - 1).bit_length()
