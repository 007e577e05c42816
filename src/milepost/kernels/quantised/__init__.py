"""Products with quantised weights: `multiply`, `partials` and routed experts' `mix`.

This is the door to the op: callers import it from here, whatever computes it. `forms` and
`reference` are the definition; on a GPU `triton` computes what it has tiles for.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.device import runs_triton
from milepost.kernels.quantised import reference
from milepost.kernels.quantised.forms import (
    BLOCK,
    FP4_LANE,
    FP8,
    FP8_MAX,
    Fp4,
    Fp8,
    Int4,
    Quantised,
    lane_of,
    pack,
    quantise_fp8,
)
from milepost.kernels.quantised.forms import multiply as multiply_plainly
from milepost.kernels.quantised.rounded import is_filled

__all__ = [
    "BLOCK",
    "FP4_LANE",
    "FP8",
    "FP8_MAX",
    "Fp4",
    "Fp8",
    "Int4",
    "Quantised",
    "lane_of",
    "mix",
    "multiply",
    "multiply_beside",
    "multiply_gated",
    "multiply_into",
    "pack",
    "partials",
    "partials_of_gated",
    "quantise_fp8",
    "rounds_rows",
]


def rounds_rows(weight: Quantised) -> bool:
    """Whether rows are multiplied with it that are rounded in blocks, by their own numbers."""
    return isinstance(weight, Fp8) and weight.depth == BLOCK and weight.input_scale is None


def multiply(
    hidden: Tensor, weight: Quantised, bias: Tensor | None = None, *, lets_next_start: bool = True
) -> Tensor:
    """`hidden` [T, I] times `weight` [O, I] transposed, plus `bias` [O]: [T, O]."""
    product = partials(hidden, weight, bias, lets_next_start=lets_next_start)
    if product.dim() == hidden.dim():
        return product
    from milepost.kernels.linear import triton

    return triton.add_up(product, hidden.dtype)


def multiply_into(
    output: Tensor, hidden: Tensor, weight: Quantised, bias: Tensor | None, *, lets_next_start: bool
) -> None:
    """`output` [T, O], whose rows may lie apart, becomes what `multiply` returns."""
    if hidden.dim() == 2 and runs_triton(hidden):
        from milepost.kernels.quantised import triton

        if triton.multiply_into(output, hidden, weight, bias, lets_next_start=lets_next_start):
            return
    output.copy_(multiply(hidden, weight, bias, lets_next_start=lets_next_start))


def multiply_beside(output: Tensor, hidden: Tensor, weight: Quantised, raw: Tensor) -> bool:
    """Whether one launch made `output` [T, O + R] what `multiply` returns of `weight` [O, I], and
    behind it of `raw` [R, I]."""
    if hidden.dim() == 2 and runs_triton(hidden):
        from milepost.kernels.quantised import triton

        return triton.multiply_beside(output, hidden, weight, raw)
    return False


def multiply_gated(hidden: Tensor, weight: Quantised) -> Tensor:
    """SiLU(gate) * up [T, O]: gates and up are the halves of `multiply(hidden, weight)`, in this
    order; `weight` [2 * O, I]."""
    if hidden.dim() == 2 and runs_triton(hidden):
        from milepost.kernels.quantised import triton

        result = triton.multiply_gated(hidden, weight)
        if result is not None:
            return result
    return norm.silu_mul(partials(hidden, weight))


def partials(
    hidden: Tensor, weight: Quantised, bias: Tensor | None = None, *, lets_next_start: bool = True
) -> Tensor:
    """What `multiply` returns; or float32 split-K partials [T, P, O] that add up to it."""
    if hidden.dim() == 2 and runs_triton(hidden):
        from milepost.kernels.quantised import triton

        product = triton.multiply(hidden, weight, bias, lets_next_start=lets_next_start)
        if product is not None:
            return product
    assert is_filled(hidden), "kernels multiply what is nothing but rounded"
    return multiply_plainly(hidden, weight, bias)


def partials_of_gated(gate_up: Tensor, weight: Quantised) -> Tensor:
    """`partials` of SiLU(first half) * second half of `gate_up` [T, 2 * I]."""
    if gate_up.dim() == 2 and runs_triton(gate_up):
        from milepost.kernels.quantised import triton

        product = triton.multiply_of_gated(gate_up, weight)
        if product is not None:
            return product
    return partials(norm.silu_mul(gate_up), weight)


def mix(hidden: Tensor, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised) -> Tensor:
    """The outputs of each token's experts in partials [T, P, H]: see `reference.mix`."""
    if runs_triton(hidden):
        from milepost.kernels.quantised import triton_mix

        mixed = triton_mix.mix(hidden, shares, experts, up, down)
        if mixed is not None:
            return mixed
    return reference.mix(hidden, shares, experts, up, down)
