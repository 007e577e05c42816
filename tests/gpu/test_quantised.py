"""GEMMs of quantised weights on a GPU, dense ones and of experts, against their definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from milepost.kernels import norm, products
from milepost.kernels.layout.emit import Emit, as_activations, values_of
from milepost.kernels.platform.device import probe
from milepost.kernels.products import Epilogue, expert_table, mix, multiply, reads, table
from milepost.kernels.products.forms.quantised import Quantised
from milepost.kernels.products.portable import grouped
from milepost.kernels.products.portable.tiles import Tiles
from tests.kernels.choices import forget, multiplication, run_kernel, without
from tests.kernels.quantised_cases import (
    check,
    check_experts,
    make_fp4,
    make_fp8,
    make_int4,
    make_int8,
    make_rows,
    route,
    to,
)
from tests.kernels.routed import as_routed, poisoned_outputs

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
    "int8": lambda: make_int8(1024, 2048),
    "int8, split": lambda: make_int8(200, 4096),
    "int8, static": lambda: make_int8(256, 512, input_scale=0.02),
    "int4, 32": lambda: make_int4(256, 2048, group=32),
    "int4, 64": lambda: make_int4(256, 2048, group=64),
    "int4, 128": lambda: make_int4(1024, 2048, group=128),
    "fp4": lambda: make_fp4(1024, 2048),
    "fp4, 32": lambda: make_fp4(200, 640, group=32),
}


@pytest.mark.parametrize("num_tokens", [1, 16, 30, 64, 301])
@pytest.mark.parametrize("name", DENSE)
def test_gemm(num_tokens: int, name: str) -> None:
    weight = to("cuda", DENSE[name]())
    hidden = make_rows(num_tokens, weight.num_inputs).cuda().bfloat16()
    bias = torch.randn(weight.num_outputs, device="cuda")
    product = run_kernel(hidden, weight, bias)
    check(product, hidden, weight, bias, bound=5e-3)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for Hopper",
)
@pytest.mark.parametrize("num_tokens", [2, 16, 30, 64])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((12288, 2048), 128), ((40960, 640), 128), ((2048, 4096), 128), ((200, 512), 1)],
)
def test_gemm_of_hopper(monkeypatch, num_tokens: int, shape: tuple[int, int], rows: int) -> None:
    monkeypatch.setattr(table, "_HOPPER_WEIGHTS", 0)
    forget()
    weight = to("cuda", make_fp8(*shape, rows=rows))
    hidden = make_rows(num_tokens, weight.num_inputs).cuda().bfloat16()
    nothing = torch.zeros(weight.num_outputs, device="cuda")
    product = run_kernel(hidden, weight)
    check(product, hidden, weight, nothing, bound=5e-3)
    wide = hidden.new_zeros(num_tokens, weight.num_outputs + 8)
    assert run_kernel(hidden, weight, into=wide[:, :-8]) is not None
    check(wide[:, :-8].float(), hidden, weight, nothing, bound=5e-3)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for Hopper",
)
@pytest.mark.parametrize("num_tokens", [2, 16, 30, 64])
@pytest.mark.parametrize(
    ("shape", "num_raw", "dtype"),
    [
        ((12288, 4096), 64, torch.bfloat16),
        ((16384, 2048), 96, torch.float16),  # more units than SMs to spare
        ((16896, 512), 40, torch.bfloat16),  # none to spare
        ((40960, 640), 128, torch.bfloat16),  # rounds, of few steps
        ((2048, 2048), 7, torch.bfloat16),  # no whole unit
    ],
)
def test_raw_weights_beside(shape: tuple[int, int], num_raw: int, num_tokens: int, dtype) -> None:
    """The FP8 outputs are the bits that they are alone; nothing else is written."""
    weight = to("cuda", make_fp8(*shape))
    raw = torch.randn(num_raw, shape[1], device="cuda").to(dtype)
    hidden = make_rows(num_tokens, shape[1]).cuda().to(dtype)
    alone = hidden.new_empty(num_tokens, shape[0])
    assert run_kernel(hidden, weight, into=alone) is not None
    wide = hidden.new_full((num_tokens + 1, shape[0] + num_raw + 1), float("nan"))
    for _ in range(3):
        output = wide[:num_tokens, :-1].fill_(float("nan"))
        assert run_kernel(hidden, weight, into=output, beside=raw) is not None
        assert torch.equal(output[:, : shape[0]], alone)
        expected = hidden.double() @ raw.double().T
        error = (output[:, shape[0] :] - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 4e-3
        assert wide[-1].isnan().all()
        assert wide[:, -1].isnan().all()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for Hopper",
)
@pytest.mark.parametrize("num_tokens", [2, 16, 64])
def test_a_chain_of_rows_and_raw_weights_beside(num_tokens: int) -> None:
    """Launches that overlap return the bits of launches one by one: weights are read early, rows
    are not."""
    enter, leave = (to("cuda", make_fp8(*shape)) for shape in ((12288, 2048), (2048, 4096)))
    for weight in (enter, leave):
        weight.scales.mul_(weight.num_inputs**-0.5 / 40)
    raw = torch.randn(64, 2048, device="cuda").bfloat16()
    scale, first = torch.ones(2048, device="cuda"), make_rows(num_tokens, 2048).cuda().bfloat16()

    def run(pause: Callable[[], object]) -> list[torch.Tensor]:
        hidden, delta, kept = first, None, []
        for _ in range(12):
            hidden, normed = norm.add_norm(hidden, delta, scale, 1e-6, emit=Emit.BOTH)
            pause()
            wide = hidden.new_empty(num_tokens, 12288 + 64)
            assert run_kernel(normed, enter, into=wide, beside=raw) is not None
            pause()
            delta = multiply(wide[:, 8256:].contiguous(), leave)
            pause()
            kept += [values_of(normed), wide, delta]
        return kept

    expected = run(torch.cuda.synchronize)
    assert all(each.isfinite().all() for each in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(10):
        for each in found:
            each.fill_(-1)
        graph.replay()
        assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for Hopper",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [2, 5, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        ((12288, 2048), 128),
        ((2048, 4096), 128),
        ((200, 512), 256),
        ((4096, 12288), 12288),
        ((16904, 1024), 128),  # whole, of 64 outputs
        ((33800, 512), 512),  # and of 128
        ((12288, 2048), 32),
        ((200, 1536), 32),
        ((33800, 512), 64),
    ],
)
def test_gemm_of_nibbles(num_tokens: int, shape: tuple[int, int], group: int, dtype) -> None:
    """A token's result does not depend on how many others there are."""
    weight = to("cuda", make_int4(*shape, group=group))
    hidden = make_rows(num_tokens, weight.num_inputs).cuda().to(dtype)
    chosen = table.PRODUCTS.choose(multiplication(hidden, weight).product, probe(hidden.device))
    assert chosen.kernel.module == "products.hopper.int4_small_m"
    nothing = torch.zeros(weight.num_outputs, device="cuda")
    product = run_kernel(hidden, weight)
    check(product, hidden, weight, nothing, bound=5e-3)
    assert torch.equal(
        product[:2],
        run_kernel(hidden[:2], weight),
    )
    wide = hidden.new_full((num_tokens, weight.num_outputs + 8), float("nan"))
    assert run_kernel(hidden, weight, into=wide[:, :-8]) is not None
    check(wide[:, :-8].float(), hidden, weight, nothing, bound=5e-3)
    assert wide[:, -8:].isnan().all()


ROW = {
    "blocks": lambda: make_fp8(1024, 2048),
    "a part has one block more": lambda: make_fp8(264, 2688),
    "fewer blocks than parts": lambda: make_fp8(48, 384),
    "many blocks": lambda: make_fp8(48, 12288),
    "large": lambda: make_fp8(4112, 8192),
    "large, rows": lambda: make_fp8(4112, 8192, rows=1),
    "rows": lambda: make_fp8(200, 512, rows=1),
    "int8": lambda: make_int8(1024, 2048),
    "int8, odd": lambda: make_int8(72, 2688),
    "int8, long": lambda: make_int8(200, 12288),
    "int4, 128": lambda: make_int4(1024, 2048, group=128),
    "int4, two tiles": lambda: make_int4(6376, 256, group=128),
    "int4, odd": lambda: make_int4(72, 2688, group=128),
    "int4, 512": lambda: make_int4(256, 4096, group=512),
    "int4, all": lambda: make_int4(64, 1280, group=1280),
    "int4, many blocks": lambda: make_int4(64, 12288, group=128),
    "int4, 64, two tiles": lambda: make_int4(8200, 2688, group=64),
    "int4, 32, two tiles": lambda: make_int4(20480, 896, group=32),
    "int4, 512, long": lambda: make_int4(2056, 8192, group=512),
    "int4, 32, long": lambda: make_int4(2080, 17408, group=32),
    "int4, 128, fewer blocks than parts": lambda: make_int4(43696, 384, group=128),
    "fp4": lambda: make_fp4(1024, 2048),
    "fp4, odd": lambda: make_fp4(72, 2688),
    "fp4, many blocks": lambda: make_fp4(64, 12288, group=32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROW)
def test_one_row(name: str, dtype: torch.dtype) -> None:
    """Nothing beside the outputs is written; gates and ups may come in one launch."""
    weight = to("cuda", ROW[name]())
    hidden = (make_rows(1, weight.num_inputs) / 8).cuda().to(dtype)
    bias = torch.randn(weight.num_outputs, device="cuda")
    wide = hidden.new_full((1, weight.num_outputs + 9), float("nan"))
    row = wide[:, :-9]
    assert run_kernel(hidden, weight, bias, into=row) is not None
    check(row.float(), hidden, weight, bias, bound=5e-3)
    assert wide[:, -9:].isnan().all()
    gates, ups = multiply(hidden, weight).float().chunk(2, 1)
    expected = torch.nn.functional.silu(gates) * ups
    gated = products.multiply_gated(hidden, weight)
    error = (gated - expected).norm() / expected.norm()
    assert error < 1e-2


CHAINS = {
    "fp8": (make_fp8, 40),
    "int8": (make_int8, 2),
    "int4": (partial(make_int4, group=128), 4),
    "int4, 32": (partial(make_int4, group=32), 4),
    "fp4": (make_fp4, 8),
}


@pytest.mark.parametrize("form", CHAINS)
def test_a_chain_of_single_rows(form: str) -> None:
    """Kernels that begin before those ahead end return the bits of kernels that run one by one:
    weights, and who was chosen, are read early."""
    make, size = CHAINS[form]
    enter, leave = (to("cuda", make(*shape)) for shape in ((8192, 512), (512, 8192)))
    up, down = to("cuda", make(32, 256, 512)), to("cuda", make(32, 512, 128))
    for weight in (enter, leave, up, down):
        scales = weight.factors if form == "fp4" else weight.scales
        scales.mul_(weight.num_inputs**-0.5 / size)
    first = torch.randn(1, 512, device="cuda").bfloat16()

    def run(pause: Callable[[], object]) -> list[torch.Tensor]:
        hidden, kept = first, []
        for _ in range(12):
            wide = multiply(hidden, enter)
            pause()
            narrow = multiply(wide, leave)
            pause()
            shares, experts = products.route(
                (narrow * 4)[:, :32].contiguous(), 4, normalise=True, num_shared=0
            )
            pause()
            mixed = mix(narrow, shares, experts, up, down)
            pause()
            hidden = torch.nn.functional.normalize((first + mixed.sum(1)).float()).bfloat16() * 22
            kept += [wide, narrow, experts, mixed]
        return kept

    expected = run(torch.cuda.synchronize)
    assert all(each.isfinite().all() for each in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(10):
        for each in found:
            each.fill_(-1)
        graph.replay()
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("num_tokens", [1, 16, 30, 64, 301])
@pytest.mark.parametrize("name", ["blocks", "split", "rows", "int4, 64"])
def test_gemm_of_gated_rows(num_tokens: int, name: str) -> None:
    weight = to("cuda", DENSE[name]())
    gate_up = make_rows(num_tokens, 2 * weight.num_inputs).cuda().bfloat16()
    gated = products.gate(gate_up, reads(weight))
    product = products.multiply(gated, weight, epilogue=Epilogue.PARTIALS)
    active = norm.silu_mul(gate_up)
    check(product, active, weight, torch.zeros(weight.num_outputs, device="cuda"), bound=2e-2)


@pytest.mark.parametrize("num_tokens", [2, 16, 63, 64, 67, 301, 1000])
def test_products_of_what_a_norm_rounded(num_tokens: int) -> None:
    """The same bits as where products round it themselves; dense ones and experts, of many tokens
    in tall blocks."""
    weight = to("cuda", make_fp8(12288, 2048))
    up, down = to("cuda", make_fp8(16, 512, 2048)), to("cuda", make_fp8(16, 2048, 256, seed=2))
    hidden = make_rows(num_tokens, 2048).cuda().bfloat16()
    scale = torch.rand(2048, device="cuda")
    normed = norm.add_norm(hidden, None, scale, 1e-6, emit=Emit.BOTH)[1]
    plain = values_of(normed)
    assert torch.equal(multiply(normed, weight), multiply(plain, weight))
    shares, experts = route(num_tokens, 16)[1:]
    given = shares.cuda().bfloat16(), experts.cuda(), up, down
    assert torch.equal(mix(normed, *given), mix(plain, *given))
    alone = norm.add_norm(hidden, None, scale, 1e-6, emit=Emit.FP8)[1]
    rounds = probe(hidden.device).rounds_to_fp8
    assert (as_activations(alone).values is None) == (rounds and num_tokens > 64)
    bias = torch.randn(12288, device="cuda").bfloat16()
    assert torch.equal(multiply(alone, weight, bias), multiply(plain, weight, bias))
    others = to("cuda", make_fp8(384, 2048, rows=1))  # torch's GEMM takes blocks alone
    assert torch.equal(multiply(alone, others), multiply(plain, others))


def fp8_experts(up_rows: int, **how: float) -> tuple[Quantised, Quantised]:
    return make_fp8(16, up_rows, 256, **how), make_fp8(16, 256, 256, seed=2, **how)


EXPERTS = {
    "blocks": lambda: fp8_experts(512),
    "rows": lambda: fp8_experts(512, rows=1),
    "channels": lambda: fp8_experts(512, rows=1, depth=256),
    "static": lambda: fp8_experts(512, rows=1, depth=256, input_scale=0.02),
    "squared relu": lambda: fp8_experts(256),
    "int8": lambda: (make_int8(16, 512, 256), make_int8(16, 256, 256, seed=2)),
    "int8, squared relu": lambda: (make_int8(16, 256, 256), make_int8(16, 256, 256, seed=2)),
    # Of a scale that leaves digits also to activations within a limit: with 0.1 they were 0 to 2.
    "int8, static": lambda: (
        make_int8(16, 512, 256, input_scale=1e-3),
        make_int8(16, 256, 256, seed=2, input_scale=2e-3),
    ),
    "int4": lambda: (make_int4(16, 512, 256, group=32), make_int4(16, 256, 256, group=64)),
    "int4, squared relu": lambda: (
        make_int4(16, 256, 256, group=128),
        make_int4(16, 256, 256, group=128),
    ),
    "int4, 128": lambda: (
        make_int4(16, 512, 256, group=128),
        make_int4(16, 256, 256, group=128),
    ),
    "fp4": lambda: (make_fp4(16, 512, 256), make_fp4(16, 256, 256, seed=2)),
    "fp4, squared relu": lambda: (
        make_fp4(16, 256, 256, group=32),
        make_fp4(16, 256, 256, group=32, seed=2),
    ),
}


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300, 1000])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(num_tokens: int, name: str) -> None:
    """The last two have so many rows an expert that FP8 in blocks is multiplied in tall ones, and
    four bits are scaled before they are multiplied, or made 16 first."""
    up, down = (to("cuda", each) for each in EXPERTS[name]())
    hidden, shares, experts = (each.cuda() for each in route(num_tokens, 16))
    given = hidden.bfloat16(), shares.bfloat16(), experts, up, down
    for limit in (0.0, 0.5):
        check_experts(mix(*given, limit=limit), *given, limit=limit)


@pytest.mark.parametrize(
    ("sizes", "num_warps", "is_swapped"),
    [((64, 64), 4, True), ((64, 64), 4, False), ((128, 64), 8, False), ((128, 128), 8, False)],
    ids=str,
)
@pytest.mark.parametrize("name", ["int4", "int4, 128", "fp4", "fp4, squared relu"])
def test_four_bits_may_be_scaled_before_they_are_multiplied(
    name: str, sizes: tuple[int, int], num_warps: int, *, is_swapped: bool
) -> None:
    up, down = (to("cuda", each) for each in EXPERTS[name]())
    hidden, shares, experts = (each.cuda() for each in route(300, 16, 0.1))
    given = hidden.bfloat16(), shares.bfloat16(), experts, up, down
    tiles = Tiles(
        block_m=sizes[0],
        block_n=sizes[1],
        block_k=128,
        num_warps=num_warps,
        num_stages=2,
        is_swapped=is_swapped,
        scales_first=True,
    )
    with poisoned_outputs():
        check_experts(grouped.run_tiles(as_routed(*given), tiles, tiles), *given)


@pytest.fixture(scope="module", params=[512, 384])
def wide_experts(request) -> tuple[Quantised, Quantised]:
    """Of several steps along the inputs and more units than programs, and the other way round; of
    an even number of blocks and an odd one."""
    size = request.param
    return to("cuda", make_fp8(48, 2 * size, 1024)), to("cuda", make_fp8(48, 1024, size, seed=2))


def choose(num_tokens: int, num_chosen: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(num_tokens)
    chosen = [torch.randperm(48, generator=random)[:num_chosen] for _ in range(num_tokens)]
    hidden = torch.randn(num_tokens, 1024, generator=random)
    shares = torch.rand(num_tokens, num_chosen, generator=random)
    return [hidden.bfloat16().cuda(), shares.bfloat16().cuda(), torch.stack(chosen).int().cuda()]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for Hopper",
)
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(5, 9), (16, 3), (17, 5), (64, 11)])
def test_experts_of_hopper(monkeypatch, wide_experts, num_tokens: int, num_chosen: int) -> None:
    """The bits of the kernels for any chip; a token's do not depend on its neighbours. Of the most
    tokens an expert has more rows than a block."""
    given = *choose(num_tokens, num_chosen), *wide_experts
    if 5 * num_chosen > expert_table.ROW_BY_ROW:
        routed = as_routed(*given)
        kernel = expert_table.EXPERTS.choose(routed.mixture, routed.chip).kernel
        assert kernel.module == "products.hopper.fp8_experts"
    mixed = mix(*given)
    check_experts(mixed, *given)
    with without("products.hopper.fp8_experts"):
        assert torch.equal(mixed, mix(*given))
    alone = mix(*(each[-5:].contiguous() for each in given[:3]), *wide_experts)
    if 5 * num_chosen > expert_table.ROW_BY_ROW:
        assert torch.equal(alone, mixed[-5:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [mix(*given) for _ in range(8)]
    for _ in range(10):
        for each in again:
            each.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(each, mixed) for each in again)


@pytest.mark.parametrize("name", ["static", "squared relu", "int4", "fp4"])
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
