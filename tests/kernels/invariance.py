"""Rows of products and experts that must have the same bits whatever stands beside them.

Legend: T rows, O outputs, I inputs, X experts, N experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.kernels import products
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.expert_table import EXPERTS, Mixture
from milepost.kernels.products.forms import Epilogue, Form, Matrix, Raw
from milepost.kernels.products.table import PRODUCTS, Product
from tests.kernels.choices import without
from tests.kernels.orders import run_all
from tests.kernels.quantised_cases import make_fp4, make_fp8, make_int4, make_int8, make_rows, to

NUM_ROWS = (1, 2, 7, 16, 33, 64, 65, 128, 129, 300, 500)
MOST_ROWS = 1000
SHAPES = ((4096, 2048), (2048, 4096), (12288, 4096), (264, 2048))
NUM_EXPERTS, NUM_CHOSEN, HIDDEN, SIZE = 64, 8, 2048, 512
FORMS = ("raw", "fp8", "int8", "int4", "fp4")


class Difference(NamedTuple):
    """Rows whose bits depend on the number of rows, and the kernels that made them."""

    num_rows: int
    kernel: str
    beside: str
    num_different: int


def make_weight(
    form: str, *shape: int, device: str = "cuda", order: SumOrder = SumOrder.FIXED
) -> Form:
    """A weight [O, I], or a stack of them, with one order for any number of rows."""
    how = {"order": order}
    if form == "raw":
        values = torch.randn(*shape, device=device).bfloat16() * shape[-1] ** -0.5
        return Raw(values=values, **how)
    make: dict[str, Callable[..., Any]] = {"fp8": make_fp8, "int8": make_int8, "fp4": make_fp4}
    made = make_int4(*shape, group=128) if form == "int4" else make[form](*shape)
    return replace(to(device, made), **how)


def compare_products(
    weight: Form, epilogue: Epilogue = Epilogue.NONE, device: str = "cuda"
) -> Iterator[Difference]:
    """Multiplies the first rows alone, and rows in another order."""
    rows = make_rows(MOST_ROWS, weight.num_inputs).to(device).bfloat16()
    whole = products.multiply(rows, weight, epilogue=epilogue)
    mixed = torch.randperm(MOST_ROWS, generator=torch.Generator().manual_seed(0)).to(device)
    for num in NUM_ROWS:
        for own in (torch.arange(num, device=device), mixed[:num]):
            found = products.multiply(rows[own], weight, epilogue=epilogue)
            yield from _differences(found, whole[own], num, lambda n: _kernel(weight, n, epilogue))


class Routing(NamedTuple):
    """Rows [T, I], routing weights and experts [T, N], and the experts' weights."""

    rows: Tensor
    shares: Tensor
    experts: Tensor
    up: Form
    down: Form

    def of(self, tokens: Tensor) -> Routing:
        own = self.rows[tokens], self.shares[tokens], self.experts[tokens]
        return Routing(*own, self.up, self.down)


def make_routing(form: str, device: str = "cuda", *, order: SumOrder = SumOrder.FIXED) -> Routing:
    how: dict[str, Any] = {"device": device, "order": order}
    random = torch.Generator().manual_seed(1)
    chosen = torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=random)[:NUM_CHOSEN] for _ in range(MOST_ROWS)]
    )
    return Routing(
        make_rows(MOST_ROWS, HIDDEN).to(device).bfloat16(),
        torch.rand(MOST_ROWS, NUM_CHOSEN, generator=random).to(device).bfloat16(),
        chosen.to(device, torch.int32),
        make_weight(form, NUM_EXPERTS, 2 * SIZE, HIDDEN, **how),
        make_weight(form, NUM_EXPERTS, HIDDEN, SIZE, **how),
    )


def compare_experts(form: str, device: str = "cuda") -> Iterator[Difference]:
    """Mixes the first tokens alone, and tokens in another order."""
    given = make_routing(form, device)
    whole = products.mix(*given)

    mixed = torch.randperm(MOST_ROWS, generator=torch.Generator().manual_seed(0)).to(device)
    for num in NUM_ROWS:
        for own in (torch.arange(num, device=device), mixed[:num]):
            found = products.mix(*given.of(own))
            yield from _differences(found, whole[own], num, lambda n: _mixing(given, n))


def survey_products(form: str, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """How many rows each kernel computes otherwise than the last one does among many rows."""
    weight = make_weight(form, *shape)
    rows = make_rows(MOST_ROWS, weight.num_inputs).cuda().bfloat16()
    whole = list(run_all(weight, rows))[-1][2]
    for num in NUM_ROWS:
        for kernel, order, found in run_all(weight, rows[:num]):
            count = _count(found, whole[:num])
            yield {"shape": shape, "rows": num, "kernel": kernel, "order": order, "other": count}


def survey_experts(form: str) -> Iterator[dict[str, Any]]:
    """As `survey_products`, for all kernels of experts."""
    given = make_routing(form, order=SumOrder.FREE)
    whole = list(_mix_all(given))[-1][1]
    for num in NUM_ROWS:
        for kernel, found in _mix_all(given.of(torch.arange(num, device="cuda"))):
            if found.shape == whole[:num].shape:  # else a token's experts are one sum
                yield {"rows": num, "experts": kernel, "other": _count(found, whole[:num])}


def _mix_all(given: Routing) -> Iterator[tuple[str, Tensor]]:
    name = _mixing(given, len(given.rows))
    if name == "none":
        return
    yield name, products.mix(*given)
    with without(name):
        yield from _mix_all(given)


def _mixing(given: Routing, num_tokens: int) -> str:
    mixture = Mixture(
        up=Matrix.of(given.up),
        down=Matrix.of(given.down),
        num_experts=NUM_EXPERTS,
        num_tokens=num_tokens,
        num_chosen=NUM_CHOSEN,
    )
    choice = EXPERTS.choose(mixture, probe(given.rows.device))
    return "none" if choice is None else choice.kernel.name


def _count(found: Tensor, expected: Tensor) -> int:
    return int((found != expected).flatten(1).any(1).sum())


def _differences(
    found: Tensor, expected: Tensor, num: int, kernel: Callable[[int], str]
) -> Iterator[Difference]:
    assert found.isfinite().all()
    count = _count(found, expected)
    if count:
        yield Difference(num, kernel(num), kernel(MOST_ROWS), count)


def _kernel(weight: Form, num_rows: int, epilogue: Epilogue) -> str:
    product = Product(weight=Matrix.of(weight), num_rows=num_rows, epilogue=epilogue)
    choice = PRODUCTS.choose(product, probe(torch.device("cuda")))
    return "none" if choice is None else choice.kernel.name
