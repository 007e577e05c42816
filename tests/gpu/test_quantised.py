"""GEMMs of quantised weights on a GPU, dense ones and of experts, against their definition."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.quantised import Quantised, mix, triton
from tests.kernels.quantised_cases import (
    check,
    check_experts,
    make_fp8,
    make_int4,
    make_rows,
    route,
    to,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE = {
    "blocks": lambda: make_fp8(1024, 2048),
    "split": lambda: make_fp8(256, 4096),
    "rows": lambda: make_fp8(200, 512, rows=1),
    "channels": lambda: make_fp8(256, 512, rows=1, depth=512),
    "static": lambda: make_fp8(256, 512, rows=1, depth=512, input_scale=0.02),
    "int4, 32": lambda: make_int4(256, 2048, group=32),
    "int4, 64": lambda: make_int4(256, 2048, group=64),
    "int4, 128": lambda: make_int4(1024, 2048, group=128),
}


@pytest.mark.parametrize("num_tokens", [1, 16, 30, 64, 301])
@pytest.mark.parametrize("name", DENSE)
def test_gemm(num_tokens: int, name: str) -> None:
    weight = to("cuda", DENSE[name]())
    hidden = make_rows(num_tokens, weight.num_inputs).cuda().bfloat16()
    bias = torch.randn(weight.num_outputs, device="cuda")
    product = triton.multiply(hidden, weight, bias, lets_next_start=True)
    check(product, hidden, weight, bias, bound=5e-3)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for Hopper",
)
@pytest.mark.parametrize("num_tokens", [1, 16, 30, 64])
@pytest.mark.parametrize(
    ("shape", "rows"), [((12288, 2048), 128), ((2048, 4096), 128), ((200, 512), 1)]
)
def test_gemm_of_hopper(monkeypatch, num_tokens: int, shape: tuple[int, int], rows: int) -> None:
    monkeypatch.setattr(triton, "_HOPPER_ROWS", range(1, 65))
    monkeypatch.setattr(triton, "_HOPPER_WEIGHTS", 0)
    weight = to("cuda", make_fp8(*shape, rows=rows))
    hidden = make_rows(num_tokens, weight.num_inputs).cuda().bfloat16()
    nothing = torch.zeros(weight.num_outputs, device="cuda")
    product = triton.multiply(hidden, weight, None, lets_next_start=True)
    check(product, hidden, weight, nothing, bound=5e-3)
    wide = hidden.new_zeros(num_tokens, weight.num_outputs + 8)
    assert triton.multiply_into(wide[:, :-8], hidden, weight, None, lets_next_start=True)
    check(wide[:, :-8].float(), hidden, weight, nothing, bound=5e-3)


def fp8_experts(up_rows: int, **how: float) -> tuple[Quantised, Quantised]:
    return make_fp8(16, up_rows, 256, **how), make_fp8(16, 256, 256, seed=2, **how)


EXPERTS = {
    "blocks": lambda: fp8_experts(512),
    "rows": lambda: fp8_experts(512, rows=1),
    "channels": lambda: fp8_experts(512, rows=1, depth=256),
    "static": lambda: fp8_experts(512, rows=1, depth=256, input_scale=0.02),
    "squared relu": lambda: fp8_experts(256),
    "int4": lambda: (make_int4(16, 512, 256, group=32), make_int4(16, 256, 256, group=64)),
    "int4, squared relu": lambda: (
        make_int4(16, 256, 256, group=128),
        make_int4(16, 256, 256, group=128),
    ),
}


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300, 1000])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(num_tokens: int, name: str) -> None:
    """The last two have so many rows an expert that FP8 in blocks is multiplied in tall ones, and
    four bits are made 16 first."""
    up, down = (to("cuda", each) for each in EXPERTS[name]())
    hidden, shares, experts = (each.cuda() for each in route(num_tokens, 16))
    given = hidden.bfloat16(), shares.bfloat16(), experts, up, down
    check_experts(mix(*given), *given)


@pytest.mark.parametrize("name", ["static", "squared relu", "int4"])
def test_a_graph_holds_them(name: str) -> None:
    """Also where no kernel takes the sizes and the definition computes."""
    up, down = (to("cuda", each) for each in EXPERTS[name]())
    hidden, shares, experts = (each.cuda() for each in route(4, 16))
    for dtype in (torch.bfloat16, torch.float32):
        given = hidden.to(dtype), shares.to(dtype), experts, up, down
        mix(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mixed = mix(*given)
        graph.replay()
        check_experts(mixed, *given)
