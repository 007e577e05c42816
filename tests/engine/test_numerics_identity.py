"""The keys of the bitwise mode's cache change with any order of summation."""

import torch

from milepost.engine.assembly.bitwise import numerics_identity
from milepost.kernels.products.table import PRODUCTS

CPU = torch.device("cpu")


def test_it_is_the_same_every_time() -> None:
    assert numerics_identity(CPU) == numerics_identity(CPU)


def test_another_kernel_is_another_identity() -> None:
    own = numerics_identity(CPU)
    with PRODUCTS.without("torch's scaled GEMM"):
        assert numerics_identity(CPU)["orders"] != own["orders"]


def test_threads_count_on_a_cpu() -> None:
    assert numerics_identity(CPU)["threads"] == torch.get_num_threads()
