"""Which GEMMs of few rows Hopper's kernel takes, without a GPU."""

from __future__ import annotations

import pytest

from milepost.kernels.platform.device import CHIPS
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Epilogue, Raw
from milepost.kernels.products.forms import Matrix
from milepost.kernels.products.forms.quantised import BLOCK, Fp8, Int4
from milepost.kernels.products.hopper import tiles
from milepost.kernels.products.portable.row_tiles import cut_gemv
from milepost.kernels.products.table import PRODUCTS, Product

H200 = CHIPS["sm_90"][1]
NUM_SMS = H200.num_sms


def tiles_of(num_tokens, num_inputs, num_outputs, *, is_whole=False):
    weight = Matrix(form=Raw, num_outputs=num_outputs, num_inputs=num_inputs)
    epilogue = Epilogue.NONE if is_whole else Epilogue.PARTIALS
    product = Product(weight=weight, num_rows=num_tokens, epilogue=epilogue)
    return tiles.cut_raw(product, H200)


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 64])
@pytest.mark.parametrize("sizes", [(2048, 4608), (2048, 6176), (4096, 5120), (4096, 12352)])
def test_what_nobody_adds_up_has_no_partials_and_a_tile_for_each_sm(sizes, num_tokens):
    """The inner sizes of a layer that two ranks share, and of a whole one."""
    found = tiles_of(num_tokens, *sizes, is_whole=True)
    assert found.split_k == 1
    assert NUM_SMS * 3 // 4 < -(-sizes[1] // found.block_n) <= NUM_SMS


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 64])
@pytest.mark.parametrize("sizes", [(2048, 2048), (2048, 4096), (4096, 2048), (6144, 4096)])
def test_few_outputs_are_cut_along_their_inputs_for_who_adds_them_up(sizes, num_tokens):
    found = tiles_of(num_tokens, *sizes)
    if found is None:
        assert sizes == (4096, 2048)
        assert num_tokens <= 16, "triton's tiles are as fast"
    else:
        assert found.split_k > 1
        assert sizes[0] % (tiles.RAW_BLOCK_K * found.split_k) == 0


def test_few_inputs_and_outputs_that_nobody_adds_up_are_left_to_others():
    assert tiles_of(16, 2048, 2048, is_whole=True) is None
    assert tiles_of(1, 2048, 12352) is None
    assert tiles_of(65, 2048, 12352) is None


@pytest.mark.parametrize("num_rows", [65, 129, 8192])
def test_many_rows_are_torchs_where_sums_are_whole(num_rows):
    def kernel(order, num_inputs=2048, chip=H200, **rest):
        weight = Matrix(form=Raw, num_outputs=256, num_inputs=num_inputs, order=order)
        return PRODUCTS.choose(Product(weight=weight, num_rows=num_rows, **rest), chip).kernel

    whole = kernel(SumOrder.FIXED)
    assert (whole.name, whole.order) == ("torch's GEMM, sums whole", "64 seq")
    for order in (SumOrder.FIXED, SumOrder.LIKE_MANY):
        assert kernel(order) == kernel(order, 12288) == whole
    assert kernel(SumOrder.FREE) != whole
    for more in ({"has_bias": True}, {"alignment": 4}, {"chip": CHIPS["sm_80"][1]}):
        assert kernel(SumOrder.FIXED, **more).name == "raw gemm"


@pytest.mark.parametrize("num_rows", [1, 17, 64])
@pytest.mark.parametrize("num_inputs", [2048, 2112, 4096, 12288])
@pytest.mark.parametrize("num_outputs", [264, 2048, 4096, 12352, 151_936])
def test_whole_sums_of_few_rows_have_whole_steps_and_room(num_outputs, num_inputs, num_rows):
    sizes = {"num_outputs": num_outputs, "num_inputs": num_inputs}
    weight = Matrix(form=Raw, order=SumOrder.FIXED, **sizes)
    found = tiles.cut_raw(Product(weight=weight, num_rows=num_rows), H200)
    step = found.lines * tiles.RAW_BLOCK_K
    assert num_inputs % step == 0
    assert found.lines == (2 if found.block_n <= 64 and num_inputs % 128 == 0 else 1)
    assert found.num_stages >= 3, "one is multiplied, one is released, others are on their way"
    assert 2 * (found.mma_m + found.block_m) * step * found.num_stages <= H200.shared_bytes


@pytest.mark.parametrize("num_outputs", [64, 576, 2560, 12288, 24576])
@pytest.mark.parametrize("num_inputs", [128, 384, 768, 2048, 2560, 2688, 4096, 12288])
def test_a_warp_has_a_piece_of_four_bits_for_each_thread(num_inputs, num_outputs):
    """Also where programs have several warps because outputs are few."""
    weight = Matrix(form=Int4, num_outputs=num_outputs, num_inputs=num_inputs, group=128)
    for epilogue, num_matrices in ((Epilogue.PARTIALS, 1), (Epilogue.GATED, 2)):
        found = cut_gemv(Product(weight=weight, num_rows=1, epilogue=epilogue), H200)
        assert found.block_k // found.num_warps in (512, 1024)
        assert found.num_warps == 1 or num_inputs % found.block_k == 0
        programs = -(-num_outputs // num_matrices // found.block_n)
        narrowest = found.block_n == 1 and num_inputs % (2 * found.block_k)
        assert programs * found.num_warps >= 4 * NUM_SMS or narrowest or found.num_warps == 4


@pytest.mark.parametrize("order", [SumOrder.FREE, SumOrder.FIXED])
@pytest.mark.parametrize("num_outputs", [256, 2048, 4096, 8449, 12288, 151_936])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 64])
def test_each_group_of_warps_multiplies_whole_mmas_of_fp8(
    num_rows: int, num_outputs: int, *, order: SumOrder
) -> None:
    """Half of the outputs that are multiplied at a time, where they are the rows of the product."""
    sizes = {"num_outputs": num_outputs, "num_inputs": 4096, "rows": BLOCK, "depth": BLOCK}
    weight = Matrix(form=Fp8, **sizes, order=order)
    found = tiles.cut_fp8(Product(weight=weight, num_rows=num_rows), H200)
    half = found.mma_n // 2
    parts = (half, found.block_n - half) if found.block_n > half else (found.block_n // 2,) * 2
    assert sum(parts) == found.block_n
    is_full = found.block_n == found.mma_n
    assert found.box == found.block_n if is_full else all(part % found.box == 0 for part in parts)
    assert not found.is_swapped or found.mma_n // 2 % tiles.MMA_M == 0
    assert found.split_k == 1
