"""Sampling's step that needs a kernel of its own: `nucleus_floor`.

This is the door to the op. Sorting, as `runner.sampling` does on a CPU, is the definition; on a GPU
`triton` finds the same without sorting, and the host needn't know which rows need it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


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
