"""The Triton linear projections against torch's, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milepost.kernels.platform.device import probe
from milepost.kernels.products import Epilogue, Raw
from milepost.kernels.products.portable import gemm, gemv
from milepost.kernels.products.portable.row_tiles import GemvTiles
from milepost.kernels.products.portable.tiles import SplitTiles, Tiles
from milepost.kernels.products.table import PRODUCTS
from tests.kernels.choices import multiplication, run_kernel
from tests.numbers import relative_error


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", [(1, 70, 37), (19, 96, 64)])
def test_multiply(
    shape: tuple[int, int, int], splits: int, is_swapped: bool, has_bias: bool
) -> None:
    num_tokens, num_inputs, num_outputs = shape
    hidden = randn(num_tokens, num_inputs + 5)[:, :num_inputs]
    weight, bias = randn(num_outputs, num_inputs), randn(num_outputs) if has_bias else None
    tiles = Tiles(
        block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2, is_swapped=is_swapped
    )
    given = multiplication(hidden, Raw(values=weight), bias)
    output = gemm.run(given, SplitTiles(tiles=tiles, split_k=splits))
    if splits > 1:
        assert output.shape == (num_tokens, splits, num_outputs)
        assert output.dtype == torch.float32
        wide = torch.full((num_tokens, num_outputs + 3), 7.0)
        gemm.add_up(output, hidden.dtype, wide[:, :num_outputs])
        output = gemm.add_up(output, hidden.dtype)
        assert torch.equal(wide[:, :num_outputs], output)
        assert (wide[:, num_outputs:] == 7).all()
    torch.testing.assert_close(output, F.linear(hidden, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gemv(has_bias: bool) -> None:
    hidden, weight = randn(2, 75)[:, :70], randn(37, 70)
    bias = randn(37) if has_bias else None
    given = multiplication(hidden, Raw(values=weight), bias)
    output = gemv.run(given, GemvTiles(block_n=8, block_k=32, num_warps=4))
    torch.testing.assert_close(output, F.linear(hidden, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "is_taken"),
    [(1, 40, True), (2, 40, True), (17, 40, True), (17, 1030, False)],
)
def test_a_few_rows(num_tokens: int, num_outputs: int, is_taken: bool) -> None:
    hidden, weight = randn(num_tokens, 300).half(), randn(num_outputs, 300).half()
    given = multiplication(hidden, Raw(values=weight))
    kernel = PRODUCTS.choose(given.product, probe(hidden.device)).kernel
    assert (kernel.name != "torch's GEMM") == is_taken
    output = run_kernel(hidden, Raw(values=weight))
    output = output.sum(1) if output.dim() == 3 else output
    assert relative_error(output, F.linear(hidden.float(), weight.float())) < 1e-3


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.PARTIALS, Epilogue.FLOAT32])
def test_no_rows(epilogue: Epilogue) -> None:
    output = run_kernel(randn(0, 300).half(), Raw(values=randn(40, 300).half()), epilogue=epilogue)
    assert output.shape == (0, 40)


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_multiply_precise(num_tokens: int) -> None:
    """Nothing is rounded to the operands' type on the way."""
    hidden, weight = randn(num_tokens, 300).half(), randn(24, 300).half()
    output = run_kernel(hidden, Raw(values=weight), epilogue=Epilogue.FLOAT32)
    output = output.sum(1) if output.dim() == 3 else output
    assert output.dtype == torch.float32
    assert relative_error(output, F.linear(hidden.float(), weight.float())) < 1e-5
