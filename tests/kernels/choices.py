"""The tables of kernels, with some rows left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from milepost.kernels.products import expert_table, table


@contextmanager
def without(*left_out: str) -> Iterator[None]:
    """Inside, no product is given to a kernel with one of these modules or names."""
    all_kernels = table.KERNELS, expert_table.EXPERT_KERNELS
    dense, experts = (
        tuple(each for each in kernels if {each.module, each.name}.isdisjoint(left_out))
        for kernels in all_kernels
    )
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
