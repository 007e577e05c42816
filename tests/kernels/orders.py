"""Kernels of the tables of products that state one order of sums, and whether they give one result.

All kernels that could serve a product run in turn, the one before left out of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from milepost.kernels import products
from milepost.kernels.platform.device import probe
from milepost.kernels.products import table
from milepost.kernels.products.forms import Form, Matrix, Raw
from tests.kernels.choices import without
from tests.kernels.quantised_cases import make_fp8, make_int4, make_int8, make_rows, to

NUM_ROWS = (1, 2, 7, 16, 33, 64, 500)
SHAPES = ((4096, 2048), (12288, 4096))


def forms(num_outputs: int, num_inputs: int) -> Iterator[tuple[str, Form]]:
    values = torch.randn(num_outputs, num_inputs, device="cuda").bfloat16() * num_inputs**-0.5
    yield "raw", Raw(values=values)
    yield "fp8", to("cuda", make_fp8(num_outputs, num_inputs))
    yield "int8", to("cuda", make_int8(num_outputs, num_inputs))
    yield "int4", to("cuda", make_int4(num_outputs, num_inputs, group=128))


def compare(weight: Form, num_rows: int) -> Iterator[dict[str, Any]]:
    hidden = make_rows(num_rows, weight.num_inputs).cuda().bfloat16()
    made = list(run_all(weight, hidden))
    for (first, order, ours), (second, other_order, theirs) in combinations(made, 2):
        if order == other_order:
            yield {"kernels": (first, second), "order": order, "equal": torch.equal(ours, theirs)}


def run_all(weight: Form, hidden: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """By each kernel that can: its name, its order, what it makes."""
    # Partials of quantised weights are added up by a launch behind them.
    epilogue = products.Epilogue.NONE if isinstance(weight, Raw) else products.Epilogue.PARTIALS
    product = table.Product(weight=Matrix.of(weight), num_rows=len(hidden), epilogue=epilogue)
    choice = table.PRODUCTS.choose(product, probe(hidden.device))
    if choice is None:
        return
    yield choice.kernel.name, choice.order, products.multiply(hidden, weight)
    with without(choice.kernel.name):
        yield from run_all(weight, hidden)
