"""Linear projections: `multiply`, and `partials` for whoever can add them up on the way.

This is the door to the op: callers import it from here, whatever computes it. Torch's GEMM is
the definition; on a GPU `triton` computes those of few rows for which it is faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tensors import accumulation_dtype, cast

_MAX_TOKENS = 128
"""Up to this many `triton` is asked whether it is faster."""


def multiply(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, launch_dependents: bool = True
) -> Tensor:
    """`hidden` [T, I] times `weight` [O, I] transposed, plus `bias` [O]: [T, O].

    On a GPU the kernel behind it may start early; not if it had better wait for this one's end.
    """
    how = {"launch_dependents": launch_dependents, "is_whole": True}
    result = _multiply(hidden, weight, bias, **how)
    if result.dim() == hidden.dim():
        return result
    from milepost.kernels.products.portable import raw_small_m

    return raw_small_m.add_up(result, hidden.dtype)


def multiply_into(
    output: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, launch_dependents: bool
) -> None:
    """`output` [T, O], whose rows may lie apart, becomes what `multiply` returns."""
    if _are_few(hidden):
        from milepost.kernels.products.portable import (
            raw_gemv,
            raw_small_m,
        )

        if raw_gemv.multiply_row_into(output, hidden, weight, bias):
            return
        how = {"launch_dependents": launch_dependents, "is_whole": True}
        product = _multiply(hidden, weight, bias, **how)
        if product.dim() == 3:
            raw_small_m.add_up(product, output.dtype, output)
            return
    else:
        product = multiply(hidden, weight, bias, launch_dependents=launch_dependents)
    output.copy_(product)


def multiply_precise(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden` [T, I] times `weight` [O, I] transposed, unrounded: float32, or float64 for float64
    inputs, [T, O] or split-K partials [T, P, O]."""
    if _are_few(hidden):
        from milepost.kernels.products.portable import raw_small_m

        result = raw_small_m.multiply_precise(hidden, weight)
        if result is not None:
            return result
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    dtype = accumulation_dtype(hidden.dtype)
    return F.linear(cast(hidden, dtype), cast(weight, dtype))


def multiply_both(
    inputs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """`multiply` of each of the inputs and its weight in one launch, where there is one."""
    if not _are_few(inputs[0]):
        return None
    from milepost.kernels.products.portable import raw_gemv

    return raw_gemv.multiply_both(inputs, weights)


def multiply_heads(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden` [T, H, I] times `weight` [H, I, O], head by head: [T, H, O] with tokens as the outer
    dimension in memory."""
    if runs_triton(hidden) and hidden.dtype in (torch.bfloat16, torch.float16):
        from milepost.kernels.products.portable import raw_gemv

        result = raw_gemv.multiply_heads(hidden, weight)
        if result is not None:
            return result
    output = hidden.new_empty(*hidden.shape[:2], weight.shape[2])
    torch.bmm(hidden.transpose(0, 1), weight, out=output.transpose(0, 1))
    return output


def partials(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, launch_dependents: bool = True
) -> Tensor:
    """What `multiply` returns, but for the order of sums; or float32 split-K partials [T, P, O]
    that add up to it, as many as suit the device.

    Whoever reads the result next adds them up for less than a pass of its own would cost.
    """
    return _multiply(hidden, weight, bias, launch_dependents=launch_dependents, is_whole=False)


def _multiply(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, launch_dependents: bool, is_whole: bool
) -> Tensor:
    if _are_few(hidden):
        # Imported where it is used: machines without a GPU need not have it.
        from milepost.kernels.products.portable import raw_small_m

        how = {"launch_dependents": launch_dependents, "is_whole": is_whole}
        result = raw_small_m.multiply_few(hidden, weight, bias, **how)
        if result is not None:
            return result
    return F.linear(hidden, weight, bias)


def _are_few(hidden: Tensor) -> bool:
    if hidden.dim() != 2 or hidden.shape[0] > _MAX_TOKENS or not runs_triton(hidden):
        return False
    return hidden.dtype in (torch.bfloat16, torch.float16)
