"""Products of rows with a weight of any form, and routed experts: `multiply` and `mix`.

This is the door to all of them: layers import it from here, whatever computes it. What becomes of
an output on the way out is its epilogue; the products behind it say what they read of it.

Legend: T tokens, I inputs, O outputs, R raw outputs, P split-K partials, X experts, N experts of a
token.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.layout.emit import Emit, Inputs, values_of
from milepost.kernels.products import moe, quantised
from milepost.kernels.products import raw as linear
from milepost.kernels.products.forms.matrix import Epilogue, Form, Packed, Raw, RawForm

__all__ = [
    "Epilogue",
    "Form",
    "Packed",
    "Raw",
    "gate",
    "mix",
    "multiply",
    "multiply_both",
    "reads",
]


def reads(weight: Form) -> Emit:
    """What products with the weight read of their rows."""
    return Emit.VALUES if isinstance(weight, RawForm) else quantised.reads(weight)


def multiply(
    rows: Inputs,
    weight: Form,
    bias: Tensor | None = None,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    emit: Emit = Emit.VALUES,
    into: Tensor | None = None,
    beside: Raw | None = None,
    launch_dependents: bool = True,
) -> Inputs:
    """`rows` [T, I] times `weight` [O, I] transposed, plus `bias` [O], through the epilogue.

    What is gated is handed on as `emit` asks; all else is a tensor. Whole products may go `into` a
    tensor [T, O] whose rows may lie apart; or [T, O + R] with what the raw weight `beside` it makes
    of the rows behind them. On a GPU the kernel behind it may start early; not if it had better
    wait for this one's end.
    """
    if into is not None:
        assert epilogue is Epilogue.NONE, "what is whole has a place"
        _multiply_into(into, rows, weight, bias, beside, launch_dependents=launch_dependents)
        return into
    if epilogue is Epilogue.GATED:
        return _multiply_gated(rows, weight, bias, emit)
    if isinstance(weight, Packed):
        return weight.multiply(values_of(rows), bias)
    is_whole = epilogue is Epilogue.NONE
    if not isinstance(weight, Raw):
        run = quantised.multiply if is_whole else quantised.partials
        return run(rows, weight, bias, launch_dependents=launch_dependents)
    values = values_of(rows)
    if epilogue is Epilogue.FLOAT32:
        assert bias is None, "what is precise has no bias"
        return linear.multiply_precise(values, weight.values)
    run = linear.multiply if is_whole else linear.partials
    return run(values, weight.values, bias, launch_dependents=launch_dependents)


def multiply_both(
    rows: tuple[Tensor, Tensor], weights: tuple[Form, Form], *, launch_dependents: bool
) -> tuple[Inputs, Inputs]:
    """`multiply` of each of the rows and its weight, in one launch where there is one."""
    first, second = weights
    if isinstance(first, Raw) and isinstance(second, Raw):
        both = linear.multiply_both(rows, (first.values, second.values))
        if both is not None:
            return both
    return (
        multiply(rows[0], first),
        multiply(rows[1], second, launch_dependents=launch_dependents),
    )


def _multiply_into(
    output: Tensor,
    rows: Inputs,
    weight: Form,
    bias: Tensor | None,
    beside: Raw | None,
    *,
    launch_dependents: bool,
) -> None:
    how = {"launch_dependents": launch_dependents}
    if beside is not None:
        assert bias is None, "products beside each other have no bias"
        if not isinstance(weight, RawForm) and quantised.multiply_beside(
            output, rows, weight, beside.values
        ):
            return
        split = weight.num_outputs
        _multiply_into(output[..., :split], rows, weight, None, None, **how)
        _multiply_into(output[..., split:], rows, beside, None, None, **how)
    elif isinstance(weight, Raw):
        linear.multiply_into(output, values_of(rows), weight.values, bias, **how)
    elif isinstance(weight, Packed):
        output.copy_(weight.multiply(values_of(rows), bias))
    else:
        quantised.multiply_into(output, rows, weight, bias, **how)


def _multiply_gated(rows: Inputs, weight: Form, bias: Tensor | None, emit: Emit) -> Inputs:
    if bias is None and not isinstance(weight, RawForm):
        gated = quantised.multiply_gated(rows, weight)
        if gated is not None:
            return gated
    product = multiply(rows, weight, bias)
    assert isinstance(product, Tensor), "nothing is gated yet"
    return gate(product, emit)


def gate(gate_up: Tensor, emit: Emit = Emit.VALUES) -> Inputs:
    """SiLU of the first half of the columns times the second: [T, 2 * I] to [T, I]."""
    if emit is Emit.FP8 and quantised.can_round_gated(gate_up):
        return quantised.round_gated(gate_up)
    return norm.silu_mul(gate_up)


def mix(rows: Inputs, shares: Tensor, experts: Tensor, up: Form, down: Form) -> Tensor:
    """`rows` [T, I] through each token's `experts` [T, N], of all X, times their `shares` [T, N]:
    partials [T, P, I], which add up to it."""
    if isinstance(up, Raw) and isinstance(down, Raw):
        return moe.partials(values_of(rows), shares, experts, up.values, down.values)
    assert not isinstance(up, RawForm), "experts have one form"
    assert not isinstance(down, RawForm), "experts have one form"
    return quantised.mix(rows, shares, experts, up, down)
