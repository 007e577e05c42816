"""Products of rows with a weight of any form, and routed experts: `multiply`, `route` and `mix`.

Layers import products from here, whichever kernels run. The epilogue says what becomes of an
output. `table` chooses the kernel and `run` runs it; without a kernel the definition in plain torch
runs.

Legend: T tokens, I inputs, O outputs, R raw outputs, P split-K partials, H heads, X experts, N
experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.layout.emit import (
    FEW,
    Emit,
    Inputs,
    as_activations,
    reads_rounded,
    values_of,
)
from milepost.kernels.platform.device import probe, runs_triton
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import accumulation_dtype, cast, in_blocks
from milepost.kernels.products import experts_reference
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.experts_reference import SOFTMAX, Scores
from milepost.kernels.products.forms import Epilogue, Form, Matrix, Packed, Raw, RawForm, quantised
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.run import Multiplication, run_mixture, run_product
from milepost.kernels.products.table import PRODUCTS, Product

_HEAD_ROWS = 64
"""Rows that heads are multiplied with at a time if bits must not depend on the number of rows."""

__all__ = [
    "SOFTMAX",
    "TABLES",
    "Epilogue",
    "Form",
    "Packed",
    "Raw",
    "Scores",
    "gate",
    "mix",
    "multiply",
    "multiply_beside",
    "multiply_gated",
    "multiply_heads",
    "norms_too",
    "reads",
    "route",
]

TABLES = PRODUCTS, EXPERTS


def reads(weight: Form) -> Emit:
    """Returns the form of rows that products with the weight read: FP8 if rows are rounded in
    blocks with a scale each, else values."""
    rounds = isinstance(weight, Fp8) and weight.depth == BLOCK and weight.input_scale is None
    return Emit.FP8 if rounds else Emit.VALUES


def multiply(
    rows: Inputs,
    weight: Form,
    bias: Tensor | None = None,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    into: Tensor | None = None,
    launch_dependents: bool = True,
    order: SumOrder = SumOrder.FREE,
) -> Tensor:
    """Multiplies `rows` [T, I] by the transposed `weight` [O, I], adds `bias` [O] and applies the
    epilogue.

    Without an epilogue the product may be written `into` a tensor [T, O], whose rows may be
    strided. On a GPU the next kernel may start early unless `launch_dependents` is False. Terms are
    added in `order`, or in the weight's own if that is stricter.
    """
    assert into is None or epilogue is Epilogue.NONE, "only whole products have a place"
    assert epilogue is not Epilogue.GATED, "`multiply_gated` gates"
    given = as_activations(rows), weight, bias, epilogue, into, None, launch_dependents, order
    return _multiply(Multiplication(*given))


def multiply_gated(
    rows: Inputs,
    weight: Form,
    bias: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
    order: SumOrder = SumOrder.FREE,
) -> Inputs:
    """Multiplies as `multiply` does, and returns SiLU of the first half of the outputs times the
    second half, [T, O / 2], as `emit` asks."""
    whole = Multiplication(as_activations(rows), weight, bias, order=order)
    if _runs_kernels(whole):
        gated = run_product(whole._replace(epilogue=Epilogue.GATED))
        if gated is not None:
            return gated
    return gate(_multiply(whole), emit, order=weight.order)


def _multiply(given: Multiplication) -> Tensor:
    product = run_product(given) if _runs_kernels(given) else None
    if product is not None:
        return product
    product = _define(values_of(given.rows), given.weight, given.bias, given.epilogue)
    return product if given.into is None else given.into.copy_(product)


def multiply_beside(
    rows: Inputs,
    weight: Form,
    beside: Raw,
    into: Tensor,
    *,
    launch_dependents: bool = True,
    order: SumOrder = SumOrder.FREE,
) -> None:
    """Multiplies `rows` [T, I] by `weight` [O, I] and by a small raw weight `beside` it [R, I], in
    one launch if a kernel serves both. The outputs stand one after the other in `into` [T, O + R].
    See `multiply`."""
    given = Multiplication(
        as_activations(rows), weight, None, Epilogue.NONE, into, None, launch_dependents, order
    )
    values = given.rows.values
    if values is not None and values.dtype == beside.values.dtype and _runs_kernels(given):
        both = given._replace(epilogue=Epilogue.BESIDE, beside=beside)
        if run_product(both) is not None:
            return
    split = weight.num_outputs
    _multiply(given._replace(into=into[..., :split]))
    _multiply(given._replace(into=into[..., split:], weight=beside))


def _runs_kernels(given: Multiplication) -> bool:
    """Whether kernels multiply the rows. Rows that exist in FP8 alone were made for kernels."""
    values = given.rows.values
    if isinstance(given.weight, Packed):
        return False
    return values is None or (values.dim() == 2 and runs_triton(values))


def _define(values: Tensor, weight: Form, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Multiplies in plain torch."""
    if weight.order.is_fixed:
        return in_blocks(lambda rows: _define_any(rows, weight, bias, epilogue), values)
    return _define_any(values, weight, bias, epilogue)


def _define_any(values: Tensor, weight: Form, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    if isinstance(weight, Packed):
        return weight.multiply(values, bias)
    if not isinstance(weight, Raw):
        return quantised.multiply(values, weight, bias)
    if epilogue is not Epilogue.FLOAT32:
        return F.linear(values, weight.values, bias)
    dtype = accumulation_dtype(values.dtype)
    return F.linear(cast(values, dtype), cast(weight.values, dtype))


def multiply_heads(
    hidden: Tensor, weight: Tensor, gate: Tensor | None = None, *, order: SumOrder = SumOrder.FREE
) -> Tensor:
    """Multiplies `hidden` [T, H, I] by `weight` [H, I, O], head by head, and by the sigmoid of
    `gate` [T, H] if given. Returns [T, H, O], token by token in memory."""
    if order.is_fixed:
        made = in_blocks(lambda rows: _define_heads(rows, weight), hidden, size=_HEAD_ROWS)
    else:
        made = _define_heads(hidden, weight)
    return made if gate is None else norm.gate_heads(made.contiguous(), gate)


def _define_heads(hidden: Tensor, weight: Tensor) -> Tensor:
    output = hidden.new_empty(*hidden.shape[:2], weight.shape[2])
    torch.bmm(hidden.transpose(0, 1), weight, out=output.transpose(0, 1))
    return output


def norms_too(row: Tensor, weight: Raw) -> bool:
    """Whether one launch norms `row` [T, I] and multiplies it by the weight:
    `norm.add_norm_and_multiply`."""
    if not runs_triton(row) or row.dtype != weight.values.dtype or row.element_size() != 2:
        return False
    product = Product(weight=Matrix.of(weight), num_rows=len(row), epilogue=Epilogue.NORMED)
    return PRODUCTS.choose(product, probe(row.device)) is not None


def gate(gate_up: Tensor, emit: Emit = Emit.VALUES, *, order: SumOrder = SumOrder.FREE) -> Inputs:
    """Returns SiLU of the first half of the columns times the second half: [T, 2 * I] to [T, I], as
    `emit` asks."""
    if order.is_fixed and not runs_triton(gate_up):
        return in_blocks(norm.silu_mul, gate_up)
    if emit is Emit.FP8 and rounds_gated(gate_up, order=order):
        from milepost.kernels.products.portable import rounding

        return rounding.gate(gate_up, probe(gate_up.device))
    return norm.silu_mul(gate_up)


def rounds_gated(gate_up: Tensor, *, order: SumOrder = SumOrder.FREE) -> bool:
    """Whether gated columns are rounded to FP8 in the same launch: for many rows, or for some if
    the next product reads FP8, as a product of one row in a FIXED order does too."""
    is_whole = gate_up.dim() == 2 and gate_up.shape[-1] % (2 * BLOCK) == 0
    if not is_whole or gate_up.element_size() != 2 or gate_up.stride(-1) != 1:
        return False
    is_some = len(gate_up) > (0 if order.is_fixed else 1)
    is_read = len(gate_up) > FEW or (is_some and reads_rounded(gate_up))
    return is_read and runs_triton(gate_up) and probe(gate_up.device).rounds_to_fp8


def route(
    logits: Tensor, num_chosen: int, *, order: SumOrder = SumOrder.FREE, **how: Any
) -> tuple[Tensor, Tensor]:
    """Chooses experts as `experts_reference.route`, with its arguments. Experts are int64, or int32
    on a GPU."""
    if not runs_triton(logits):

        def define(rows: Tensor) -> tuple[Tensor, Tensor]:
            return experts_reference.route(rows, num_chosen, **how)

        weights, experts = in_blocks(define, logits) if order.is_fixed else define(logits)
        return weights, experts
    from milepost.kernels.products import routing

    return routing.route(logits, num_chosen, **how)


def mix(
    rows: Inputs,
    routing_weights: Tensor,
    experts: Tensor,
    up: Form,
    down: Form,
    *,
    limit: float = 0.0,
    order: SumOrder = SumOrder.FREE,
) -> Tensor:
    """Runs each token's `experts` [T, N] on `rows` [T, I], weighted by `routing_weights` [T, N].
    Returns partials [T, P, I] to be added up. A `limit` other than 0 bounds SwiGLU's factors: see
    `norm.silu_mul`. Sums have the `order`, or the weights' own if that is stricter."""
    given = as_activations(rows)
    if given.values is None or (given.values.dim() == 2 and runs_triton(given.values)):
        how = routing_weights, experts, up, down
        mixed = run_mixture(given, *how, limit=limit, order=order)
        if mixed is not None:
            return mixed
    hidden = values_of(given)
    if isinstance(up, Raw) and isinstance(down, Raw):
        weights = up.values, down.values
        chosen = routing_weights, experts
        mixed = experts_reference.apply(hidden, *chosen, *weights, limit=limit, order=up.order)
        return mixed.unsqueeze(1)
    assert not isinstance(up, RawForm), "experts have one form"
    assert not isinstance(down, RawForm), "experts have one form"
    return experts_reference.mix_quantised(hidden, routing_weights, experts, up, down, limit=limit)
