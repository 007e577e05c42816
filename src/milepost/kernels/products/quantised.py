"""Products with quantised weights: `multiply`, `partials` and routed experts' `mix`.

This is the door to the op: `products` and layers import it from here, whatever computes it. `forms`
and `reference` are the definition; on a GPU `triton` computes what it has tiles for.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.layout.emit import FEW, Activations, Emit, Inputs, as_activations, values_of
from milepost.kernels.platform.device import probe, runs_gluon, runs_triton
from milepost.kernels.products import quantised_reference
from milepost.kernels.products.forms.quantised import (
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
from milepost.kernels.products.forms.quantised import multiply as multiply_plainly

__all__ = [
    "BLOCK",
    "FP4_LANE",
    "FP8",
    "FP8_MAX",
    "Fp4",
    "Fp8",
    "Int4",
    "Quantised",
    "can_round_gated",
    "lane_of",
    "mix",
    "multiply",
    "multiply_beside",
    "multiply_gated",
    "multiply_into",
    "pack",
    "partials",
    "quantise_fp8",
    "reads",
    "round_gated",
]


def reads(weight: Quantised) -> Emit:
    """What products with the weight read: FP8 if it rounds rows in blocks, by their own numbers."""
    rounds = isinstance(weight, Fp8) and weight.depth == BLOCK and weight.input_scale is None
    return Emit.FP8 if rounds else Emit.VALUES


def multiply(
    rows: Inputs, weight: Quantised, bias: Tensor | None = None, *, launch_dependents: bool = True
) -> Tensor:
    """`rows` [T, I] times `weight` [O, I] transposed, plus `bias` [O]: [T, O]."""
    rows = as_activations(rows)
    product = partials(rows, weight, bias, launch_dependents=launch_dependents)
    if product.dim() == 2 or not _are_flat(rows):
        return product
    from milepost.kernels.products.portable import raw_small_m as triton

    return triton.add_up(product, rows.dtype)


def multiply_into(
    output: Tensor, rows: Inputs, weight: Quantised, bias: Tensor | None, *, launch_dependents: bool
) -> None:
    """`output` [T, O], whose rows may lie apart, becomes what `multiply` returns."""
    rows = as_activations(rows)
    if _run_fused(rows):
        from milepost.kernels.products import run_quantised as triton

        if triton.multiply_into(output, rows, weight, bias, launch_dependents=launch_dependents):
            return
    output.copy_(multiply(rows, weight, bias, launch_dependents=launch_dependents))


def multiply_beside(output: Tensor, rows: Inputs, weight: Quantised, raw: Tensor) -> bool:
    """Whether one launch made `output` [T, O + R] what `multiply` returns of `weight` [O, I], and
    behind it of `raw` [R, I]."""
    rows = as_activations(rows)
    if not _run_fused(rows):
        return False
    from milepost.kernels.products import run_quantised as triton

    return triton.multiply_beside(output, rows, weight, raw)


def multiply_gated(rows: Inputs, weight: Quantised) -> Tensor | None:
    """SiLU(gate) * up [T, O], if one launch makes it: gates and up are the halves of
    `multiply(rows, weight)`, in this order; `weight` [2 * O, I]."""
    rows = as_activations(rows)
    if not _run_fused(rows):
        return None
    from milepost.kernels.products import run_quantised as triton

    return triton.multiply_gated(rows, weight)


def can_round_gated(gate_up: Tensor) -> bool:
    """Whether SiLU(first half) * second half of `gate_up` [T, 2 * I] is rounded as it is made, for
    products of many rows, or of some on Hopper, which read rounded ones."""
    is_whole = gate_up.dim() == 2 and gate_up.shape[-1] % (2 * BLOCK) == 0
    if not is_whole or gate_up.element_size() != 2 or gate_up.stride(-1) != 1:
        return False
    is_read = len(gate_up) > FEW or (len(gate_up) > 1 and runs_gluon(gate_up))
    return is_read and runs_triton(gate_up)


def round_gated(gate_up: Tensor) -> Activations:
    """SiLU(first half) * second half of `gate_up` [T, 2 * I], in FP8 alone; where it
    `can_round_gated`."""
    from milepost.kernels.products.portable import rounding

    return rounding.gate(gate_up, probe(gate_up.device))


def partials(
    rows: Inputs, weight: Quantised, bias: Tensor | None = None, *, launch_dependents: bool = True
) -> Tensor:
    """What `multiply` returns; or float32 split-K partials [T, P, O] that add up to it."""
    rows = as_activations(rows)
    if _run_fused(rows):
        from milepost.kernels.products import run_quantised as triton

        product = triton.multiply(rows, weight, bias, launch_dependents=launch_dependents)
        if product is not None:
            return product
    return multiply_plainly(values_of(rows), weight, bias)


def mix(rows: Inputs, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised) -> Tensor:
    """The outputs of each token's experts in partials [T, P, H]: see `quantised_reference.mix`."""
    rows = as_activations(rows)
    if _run_fused(rows):
        from milepost.kernels.products import run_experts

        mixed = run_experts.mix(rows, shares, experts, up, down)
        if mixed is not None:
            return mixed
    return quantised_reference.mix(values_of(rows), shares, experts, up, down)


def _run_fused(rows: Activations) -> bool:
    """Whether kernels in Triton multiply the rows."""
    return rows.values is None or (_are_flat(rows) and runs_triton(rows.values))


def _are_flat(rows: Activations) -> bool:
    return rows.values is None or rows.values.dim() == 2
