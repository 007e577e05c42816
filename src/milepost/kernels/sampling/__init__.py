"""Sampling's steps that need kernels of their own: `likeliest` and `nucleus_floor`.

This is the door to the ops. Torch's argmax is the definition of the first, and takes several times
as long on a GPU. Sorting, as `runner.sampling` does on a CPU, is that of the second; on a GPU
`triton` finds the same without sorting, and the host needn't know which rows need it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """The greatest of each row of `logits` [R, V], of equal ones the first: [R] int64."""
    if not logits.is_cuda or logits.dtype == torch.float64 or find_spec("triton") is None:
        return logits.argmax(dim=-1)
    from milepost.kernels.sampling import triton

    return triton.likeliest(logits)


def can_search(scaled: Tensor) -> bool:
    """Whether `nucleus_floor` takes these logits."""
    is_here = scaled.is_cuda and find_spec("triton") is not None
    return is_here and scaled.dtype == torch.float32


def nucleus_floor(
    scaled: Tensor, floor: Tensor, wanted: Tensor, known: Tensor, is_known: Tensor
) -> Tensor:
    """See `triton.nucleus_floor`."""
    from milepost.kernels.sampling import triton

    return triton.nucleus_floor(scaled, floor, wanted, known, is_known)
