"""Fused norms on a GPU at real shapes, against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels import norm, products
from milepost.kernels.norm import reference
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2048), (64, 4096), (700, 2048), (3, 300)], ids=str)
@pytest.mark.parametrize("num_parts", [None, 0, 9])
def test_add_norm(num_parts: int | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Without a delta, with a plain one (0) and with parts."""
    random = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(shape, generator=random, device="cuda", dtype=dtype)
    scale = torch.randn(shape[1], generator=random, device="cuda")
    delta = None
    if num_parts is not None:
        sizes = (shape[0], num_parts, shape[1]) if num_parts else shape
        delta = torch.randn(sizes, generator=random, device="cuda", dtype=dtype)
    outputs = norm.add_norm(hidden, delta, scale, 1e-6)
    wide = None if delta is None else delta.double()
    expected = reference.add_norm(hidden.double(), wide, scale.double(), 1e-6)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        assert relative_error(output, wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(264, 2048), (64, 2048), (512, 4096), (3, 300)], ids=str)
@pytest.mark.parametrize("num_parts", [None, 0, 9])
def test_add_norm_and_multiply(
    num_parts: int | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The product is that of the norm as it is stored; beside it nothing is written."""
    random = torch.Generator("cuda").manual_seed(0)
    num_outputs, size = shape
    hidden = torch.randn(1, size, generator=random, device="cuda", dtype=dtype)
    weight = torch.randn(shape, generator=random, device="cuda", dtype=dtype)
    scale = torch.randn(size, generator=random, device="cuda")
    delta = None
    if num_parts is not None:
        sizes = (1, num_parts, size) if num_parts else (1, size)
        delta = torch.randn(sizes, generator=random, device="cuda", dtype=dtype)
    assert products.norms_too(hidden, products.Raw(values=weight))
    wide = torch.full((1, num_outputs + 16), torch.nan, device="cuda", dtype=dtype)
    how = scale, 1e-6, 1.0, weight, wide[:, 8:-8]
    total, normed = norm.add_norm_and_multiply(hidden, delta, *how)
    exact = None if delta is None else delta.double()
    expected = reference.add_norm(hidden.double(), exact, scale.double(), 1e-6)
    assert relative_error(total, expected[0]) < TOLERANCES[dtype]
    assert relative_error(normed, expected[1]) < TOLERANCES[dtype]
    product = normed.double() @ weight.double().t()
    assert relative_error(wide[:, 8:-8], product) < TOLERANCES[dtype]
    assert wide[:, :8].isnan().all()
    assert wide[:, -8:].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 24576), (700, 1024), (3, 302)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = torch.randn(shape, device="cuda").to(dtype)
    expected = reference.silu_mul(gate_up.double())
    assert relative_error(norm.silu_mul(gate_up), expected) < TOLERANCES[dtype]
