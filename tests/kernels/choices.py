"""The tables of kernels, with some rows left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from milepost.kernels.layout.emit import Inputs, as_activations
from milepost.kernels.products import Epilogue, Form, Raw
from milepost.kernels.products.expert_table import EXPERTS
from milepost.kernels.products.run import Multiplication, run_product
from milepost.kernels.products.table import PRODUCTS

TABLES = PRODUCTS, EXPERTS


@contextmanager
def without(*left_out: str) -> Iterator[None]:
    """Inside, no product is given to a kernel with one of these modules or names."""
    before = sum(len(table.kernels) for table in TABLES)
    with PRODUCTS.without(*left_out), EXPERTS.without(*left_out):
        assert sum(len(table.kernels) for table in TABLES) < before
        yield


def forget() -> None:
    """Have everything chosen again."""
    for table in TABLES:
        table.forget()


def run_kernel(
    rows: Inputs,
    weight: Form,
    bias: Tensor | None = None,
    *,
    into: Tensor | None = None,
    beside: Tensor | None = None,
    epilogue: Epilogue = Epilogue.PARTIALS,
) -> Tensor | None:
    """The product by the kernel that the table chooses, in a place if there is one."""
    return run_product(
        multiplication(rows, weight, bias, into=into, beside=beside, epilogue=epilogue)
    )


def multiplication(
    rows: Inputs,
    weight: Form,
    bias: Tensor | None = None,
    *,
    into: Tensor | None = None,
    beside: Tensor | None = None,
    epilogue: Epilogue = Epilogue.PARTIALS,
) -> Multiplication:
    """Such a product."""
    if into is not None:
        epilogue = Epilogue.NONE if beside is None else Epilogue.BESIDE
    raw = None if beside is None else Raw(values=beside)
    return Multiplication(as_activations(rows), weight, bias, epilogue, into, raw)
