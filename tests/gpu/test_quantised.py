"""FP8 GEMMs on a GPU, dense ones and those of experts, against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.kernels.quantised import Fp8, quantise_fp8, reference, triton
from milepost.kernels.quantised.forms import multiply
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_fp8(*shape: int, rows: int = 128) -> Fp8:
    raw = torch.randn(shape, device="cuda").view(-1, *shape[-2:])
    made = [quantise_fp8(weights, rows) for weights in raw]
    values, scales = (torch.stack(each) for each in zip(*made, strict=True))
    lead = shape[:-2]
    return Fp8(
        values=values.view(*lead, *values.shape[1:]),
        scales=scales.view(*lead, *scales.shape[1:]),
        rows=rows,
        depth=128,
    )


def make_rows(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 16, 30, 64, 300])
@pytest.mark.parametrize(
    ("shape", "rows"), [((9216, 2048), 128), ((2048, 4096), 128), ((200, 512), 1)]
)
def test_gemm(num_tokens: int, shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    weight, hidden = make_fp8(*shape, rows=rows), make_rows(num_tokens, shape[1])
    product = triton.partials(hidden, weight, None, lets_next_start=True)
    product = product.sum(1) if product.dim() == 3 else product
    assert relative_error(product, multiply(hidden, weight)) < 5e-3


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 300, 2000])
def test_experts(num_tokens: int) -> None:
    torch.manual_seed(0)
    up, down = make_fp8(32, 1024, 2048), make_fp8(32, 2048, 512)
    hidden = make_rows(num_tokens, 2048) * 0.02
    experts = torch.stack([torch.randperm(32, device="cuda")[:8] for _ in range(num_tokens)])
    shares = torch.rand(num_tokens, 8, device="cuda", dtype=torch.bfloat16)
    mixed = triton.mix(hidden, shares, experts.int(), up, down).float().sum(1)
    expected = reference.mix(hidden.float(), shares.float(), experts, up, down)[:, 0]
    assert relative_error(mixed, expected) < 3e-2
