"""The tables of kernels, with some rows left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from milepost.kernels.products import expert_table, table


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Inside, no product is given to a kernel of these modules."""
    dense = tuple(each for each in table.KERNELS if each.module not in modules)
    experts = tuple(each for each in expert_table.EXPERT_KERNELS if each.module not in modules)
    assert len(dense) + len(experts) < len(table.KERNELS) + len(expert_table.EXPERT_KERNELS)
    try:
        with (
            mock.patch.object(table, "KERNELS", dense),
            mock.patch.object(expert_table, "EXPERT_KERNELS", experts),
        ):
            forget()
            yield
    finally:
        forget()


def forget() -> None:
    """Have everything chosen again."""
    table._choose.cache_clear()
    expert_table._choose.cache_clear()
