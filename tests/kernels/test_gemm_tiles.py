"""How GEMMs of quantised weights are cut up on every chip."""

from __future__ import annotations

import pytest

from milepost.kernels.platform.device import CHIPS
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.forms import Matrix
from milepost.kernels.products.forms.quantised import Fp4, Int4
from milepost.kernels.products.portable.tiles import choose_experts, choose_gemm

INT4 = Matrix(Int4, 1024, 2048, group=128)
FP4 = Matrix(Fp4, 1024, 2048, group=16)
ROWS = (0.3, 1, 6, 7, 8, 9, 16, 17, 33, 64, 65, 5000)


@pytest.mark.parametrize("weight", [INT4, FP4])
@pytest.mark.parametrize("arch", CHIPS)
def test_a_row_of_a_fixed_order_is_never_multiplied_by_instructions_for_fewer(
    weight: Matrix, arch: str
) -> None:
    fixed, chip = weight._replace(order=SumOrder.FIXED), CHIPS[arch][1]
    for num_rows in ROWS:
        tiles = choose_gemm(num_rows, fixed, chip), *choose_experts(num_rows, fixed, chip)
        assert all(each.block_m >= 16 and each.is_swapped for each in tiles)
        assert {each.block_k for each in tiles} == {128}


@pytest.mark.parametrize("arch", CHIPS)
def test_both_projections_of_experts_have_blocks_of_as_many_rows(arch: str) -> None:
    for num_rows in ROWS:
        up, down = choose_experts(num_rows, INT4, CHIPS[arch][1])
        assert up.block_m == down.block_m


@pytest.mark.parametrize(
    ("arch", "rows"),
    [
        ("sm_90", {8: 8, 9: 8, 16: 8, 17: 32, 64: 64}),
        ("sm_86", {8: 8, 9: 16, 16: 16, 17: 32, 64: 64}),
        ("gfx942", {1: 16, 16: 16, 17: 32, 64: 64}),
    ],
)
def test_rows_of_a_tile_are_what_matrix_units_multiply(arch: str, rows: dict[int, int]) -> None:
    chip = CHIPS[arch][1]
    assert {each: choose_gemm(each, INT4, chip).block_m for each in rows} == rows
