"""With `batch_invariant`, the references give a row the same bits whatever rows stand beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from milepost.kernels import products
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Form, Raw
from milepost.kernels.products.experts_reference import Scores
from milepost.kernels.products.forms import pack
from tests.kernels.quantised_cases import make_fp4, make_fp8, make_int4, make_int8

NUM_ROWS, NUM_INPUTS = 150, 256
DTYPES = [torch.float32, torch.bfloat16]


def _raw(*shape: int) -> Raw:
    random = torch.Generator().manual_seed(0)
    return Raw(values=torch.randn(shape, generator=random) * shape[-1] ** -0.5)


FORMS: dict[str, Callable[..., Form]] = {
    "raw": _raw,
    "fp8": make_fp8,
    "int8": make_int8,
    "int4": lambda *shape: make_int4(*shape, group=128),
    "fp4": make_fp4,
}


def make(form: str, dtype: torch.dtype, *shape: int) -> Form:
    weight = replace(FORMS[form](*shape), order=SumOrder.FIXED)
    return replace(weight, values=weight.values.to(dtype)) if isinstance(weight, Raw) else weight


def assert_rows_are_alone(compute: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """Any of the rows, in any order, have the bits that they have among all."""
    whole, random = compute(rows), torch.Generator().manual_seed(1)
    for num in (1, 2, 7, 16, 17, 64, NUM_ROWS):
        own = torch.randperm(NUM_ROWS, generator=random)[:num]
        assert torch.equal(compute(rows[own]), whole[own]), f"{num} rows"


def make_rows(dtype: torch.dtype, num_inputs: int = NUM_INPUTS) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(NUM_ROWS, num_inputs, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", [products.multiply, products.multiply_gated])
@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, operation: Callable[..., object], dtype: torch.dtype) -> None:
    weight = make(form, dtype, 128, NUM_INPUTS)

    def multiply(rows: Tensor) -> Tensor:
        product = operation(rows, weight)
        assert isinstance(product, Tensor)
        return product

    assert_rows_are_alone(multiply, make_rows(dtype))


def test_products_with_packed_weights() -> None:
    packed = pack(make("raw", torch.float32, 512, NUM_INPUTS))
    if packed is None:
        pytest.skip("torch has no oneDNN here")
    assert_rows_are_alone(lambda rows: products.multiply(rows, packed), make_rows(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_heads(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = make_rows(dtype, 72).unflatten(1, (3, 24))
    how = {"order": SumOrder.FIXED}
    assert_rows_are_alone(lambda own: products.multiply_heads(own, weight, **how), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scores", [Scores(), Scores(kind="sigmoid", norm_eps=1e-9)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_routed_experts(form: str, scores: Scores, dtype: torch.dtype) -> None:
    up, down = make(form, dtype, 7, 256, NUM_INPUTS), make(form, dtype, 7, NUM_INPUTS, 128)
    router = torch.randn(7, NUM_INPUTS, generator=torch.Generator().manual_seed(4)).to(dtype)

    def mix(rows: Tensor) -> Tensor:
        logits = products.multiply(rows, Raw(values=router, order=SumOrder.FIXED))
        how = {"normalise": True, "scores": scores, "order": SumOrder.FIXED}
        shares, experts = products.route(logits, 3, **how)
        return products.mix(rows, shares, experts, up, down)

    assert_rows_are_alone(mix, make_rows(dtype))
