"""Linear projections: `multiply`, and `parts` for whoever can add them up on the way.

This is the door to the op: callers import it from here, whatever computes it. Torch's product is
the definition; on a GPU `triton` computes those of few rows for which it is faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_TOKENS = 128
"""Up to this many `triton` is asked whether it is faster."""


def multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`hidden` [T, I] times `weight` [O, I] transposed, plus `bias` [O]: [T, O]."""
    product = parts(hidden, weight, bias)
    if product.dim() == hidden.dim():
        return product
    from milepost.kernels.linear import triton

    return triton.add_up(product, hidden.dtype)


def parts(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `multiply` returns; or float32 parts [T, P, O] that add up to it, as many as suit the
    device.

    Whoever reads the product next adds them up for less than a pass of its own would cost.
    """
    is_fast = hidden.is_cuda and hidden.dim() == 2 and hidden.shape[0] <= _MAX_TOKENS
    if is_fast and hidden.dtype in (torch.bfloat16, torch.float16):
        # Imported where it is used: machines without a GPU need not have it.
        from milepost.kernels.linear import triton

        product = triton.multiply_few(hidden, weight, bias)
        if product is not None:
            return product
    return F.linear(hidden, weight, bias)
