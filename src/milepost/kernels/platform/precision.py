"""In which type the kernels add up: float32, unless the inputs are float64."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of intermediate sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_apart(like: Tensor, *shape: int) -> Tensor:
    """An empty tensor [..., rows, columns] with something between the rows. Of those torch computes
    each by itself: an element's bits do not depend on which rows are beside its own."""
    return like.new_empty(*shape[:-1], shape[-1] + 1)[..., :-1]


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, for less where that does nothing: a step asks a hundred times."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
