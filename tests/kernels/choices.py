"""The tables of kernels, with some rows left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from milepost.kernels.products.expert_table import EXPERTS
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
