"""How GEMMs of quantised weights, and raw experts, are cut up on every chip."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.layout.emit import as_activations
from milepost.kernels.platform.device import CHIPS
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Raw, run
from milepost.kernels.products.forms import Matrix
from milepost.kernels.products.forms.quantised import Fp4, Int4
from milepost.kernels.products.portable.tiles import choose_experts, choose_gemm, choose_grouped
from milepost.kernels.products.run import RoutedRows

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


@pytest.mark.parametrize("sizes", [(2048, 512), (2112, 192), (2080, 96)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 300, 900])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_raw_experts_of_a_fixed_order_have_small_tiles_where_those_add_up_alike(
    arch: str, num_tokens: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere their tiles have the operands and steps of the largest ones."""
    monkeypatch.setattr(run, "probe", lambda _: CHIPS[arch][1])
    hidden, size = sizes

    def choose(order: SumOrder):
        up = Raw(values=torch.empty(64, 2 * size, hidden, dtype=torch.bfloat16), order=order)
        down = Raw(values=torch.empty(64, hidden, size, dtype=torch.bfloat16), order=order)
        experts = torch.zeros(num_tokens, 4, dtype=torch.int32)
        rows = as_activations(torch.empty(num_tokens, hidden, dtype=torch.bfloat16))
        return choose_grouped(RoutedRows(rows, experts.bfloat16(), experts, up, down))

    fixed, free = choose(SumOrder.FIXED), choose(SumOrder.FREE)
    if arch == "sm_90" and size % 64 == 0:
        assert fixed == free
        assert all(inputs % tiles.block_k == 0 for inputs, tiles in zip(sizes, fixed, strict=True))
    else:
        assert {(each.block_m, each.block_k, each.is_swapped) for each in fixed} <= {
            (64, 64, False),
            (64, 32, False),
        }
