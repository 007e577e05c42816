"""Linear projections of few rows on a GPU at real shapes, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milepost.kernels import products
from milepost.kernels.products import Epilogue, Raw
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64, 300, 600])
@pytest.mark.parametrize(
    "sizes",
    [
        (2048, 12352),
        (2048, 9216),
        (2048, 4608),
        (2048, 2048),
        (4096, 2048),
        (4096, 4096),
        (4096, 10240),
        (4096, 20000),
        (12288, 4096),
        (2048, 264),
        (300, 70),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_multiply(
    has_bias: bool, sizes: tuple[int, int], num_tokens: int, dtype: torch.dtype
) -> None:
    """`hidden` is some columns of a wider tensor, as projections are."""
    random = torch.Generator("cuda").manual_seed(num_tokens)
    num_inputs, num_outputs = sizes
    wide = torch.randn(num_tokens, num_inputs + 64, generator=random, device="cuda", dtype=dtype)
    hidden = wide[:, 64:]
    weight = torch.randn(num_outputs, num_inputs, generator=random, device="cuda", dtype=dtype)
    bias = weight[:, 0].contiguous() if has_bias else None
    form = Raw(values=weight)
    output = products.multiply(hidden, form, bias)
    expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    assert output.dtype == dtype
    assert relative_error(output, expected) < TOLERANCES[dtype]
    assert torch.equal(output, products.multiply(hidden, form, bias))
    beside = torch.zeros(num_tokens, num_outputs + 8, device="cuda", dtype=dtype)
    products.multiply(hidden, form, bias, into=beside[:, 8:])
    assert torch.equal(beside[:, 8:], output)
    assert (beside[:, :8] == 0).all()
    parts = products.multiply(hidden, form, bias, epilogue=Epilogue.PARTIALS)
    summed = parts if parts.dim() == 2 else parts.sum(1)
    assert relative_error(summed, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("sizes", [(4096, 12288), (4096, 17408), (2048, 8200), (300, 70)], ids=str)
def test_multiply_gated(sizes: tuple[int, int], num_tokens: int, dtype: torch.dtype) -> None:
    random = torch.Generator("cuda").manual_seed(num_tokens)
    num_inputs, num_outputs = sizes
    hidden = torch.randn(num_tokens, num_inputs, generator=random, device="cuda", dtype=dtype)
    weight = torch.randn(2 * num_outputs, num_inputs, generator=random, device="cuda", dtype=dtype)
    weight *= num_inputs**-0.5
    gate, up = F.linear(hidden.double(), weight.double()).chunk(2, -1)
    output = products.multiply_gated(hidden, Raw(values=weight))
    assert output.dtype == dtype
    assert relative_error(output, F.silu(gate) * up) < TOLERANCES[dtype]
    assert torch.equal(output, products.multiply_gated(hidden, Raw(values=weight)))
