"""Rows rounded to e2m1 on a GPU, and their products with e2m1 weights, against the definition. On
chips without such products Triton makes 16-bit numbers of both, with powers of two as scales in
every version, and with float8 ones from 3.8 on."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.layout.emit import as_activations
from milepost.kernels.platform.device import Chip, probe, triton_version
from milepost.kernels.products.portable.rounding import round_rows
from milepost.kernels.products.run import run_mixture
from tests.kernels.choices import forget, run_kernel
from tests.kernels.quantised_cases import (
    check,
    check_experts,
    make_rows,
    make_w4a4,
    pack_rows,
    route,
    to,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[16, 32])
def group(request, monkeypatch):
    """Sizes of groups; inside, the chip is taken to have these products."""
    is_native = probe(torch.device("cuda")).has_fp4
    if request.param == 16 and not is_native and triton_version() < (3, 8):
        pytest.skip("Triton takes scales of float8 apart from 3.8 on")
    monkeypatch.setattr(Chip, "has_fp4", True)
    forget()
    yield request.param
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows(size: int, dtype: torch.dtype) -> None:
    weight = to("cuda", make_w4a4(8, 4096, group=size))
    rows = make_rows(33, 4096).cuda().to(dtype)
    rows[0, :32], rows[5, 70] = 0, float("nan")
    codes, scales = round_rows(rows, weight, probe(rows.device), are_few=True)
    expected_codes, expected_scales = pack_rows(rows, weight)
    # A quotient may be off by its last bit, and then lie on the other side of a bound.
    for values, expected in ((codes & 0x77, expected_codes & 0x77), (scales, expected_scales)):
        assert (values != expected).float().mean() < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 16, 30, 64, 301])
@pytest.mark.parametrize("shape", [(1024, 2048), (200, 640)])
def test_gemm(shape: tuple[int, int], num_tokens: int, group: int) -> None:
    weight = to("cuda", make_w4a4(*shape, group=group))
    hidden = make_rows(num_tokens, weight.num_inputs).cuda().bfloat16()
    bias = torch.randn(weight.num_outputs, device="cuda")
    check(run_kernel(hidden, weight, bias), hidden, weight, bias, bound=5e-3)


@pytest.mark.parametrize("num_tokens", [1, 24, 200, 700])
@pytest.mark.parametrize("is_gated", [True, False])
def test_experts(is_gated: bool, num_tokens: int, group: int) -> None:
    up = to("cuda", make_w4a4(8, 256 * (1 + is_gated), 512, group=group))
    down = to("cuda", make_w4a4(8, 512, 256, group=group, seed=2))
    hidden, shares, experts = (each.cuda() for each in route(num_tokens, 8, 0.1))
    hidden = hidden.repeat(1, 2)
    given = (hidden, shares, experts, up, down)
    check_experts(run_mixture(as_activations(hidden), *given[1:]), *given, strays=0.02)
