"""The Triton kernels of quantised weights against the definition, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from milepost.kernels.layout import emit
from milepost.kernels.layout.emit import Emit, as_activations
from milepost.kernels.norm import triton as norm_triton
from milepost.kernels.norm.reference import silu_mul
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.products import experts_reference, library
from milepost.kernels.products.forms import Epilogue, Form, Raw
from milepost.kernels.products.forms.quantised import (
    FP8,
    Fp8,
    Quantised,
    multiply,
    quantise_int8,
    quantise_rows,
)
from milepost.kernels.products.grouping import group_many
from milepost.kernels.products.portable import four_bits, gemm, gemv, grouped, grouped_large
from milepost.kernels.products.portable import (
    gathering as triton_gathering,
)
from milepost.kernels.products.portable import (
    rounding as triton_rounding,
)
from milepost.kernels.products.portable.row_tiles import GemvTiles
from milepost.kernels.products.portable.tiles import SplitTiles, Tiles
from milepost.kernels.products.run import Multiplication, run_mixture
from tests.kernels.choices import forget, multiplication, run_kernel
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
from tests.numbers import relative_error


@pytest.mark.parametrize(
    ("num_tokens", "rows", "depth", "input_scale"),
    [
        (1, 128, 128, None),
        (1, 1, 128, None),
        (3, 128, 128, None),
        (70, 128, 128, None),
        (3, 1, 128, None),
        (33, 1, 256, None),
        (3, 1, 256, 0.02),
    ],
)
def test_fp8_gemm(num_tokens: int, rows: int, depth: int, input_scale: float | None) -> None:
    weight = make_fp8(200, 256, rows=rows, depth=depth, input_scale=input_scale)
    hidden, bias = make_rows(num_tokens, 256), torch.randn(200)
    check(run_kernel(hidden, weight, bias), hidden, weight, bias)


@pytest.fixture
def without_fp8(monkeypatch):
    """As on a chip that cannot multiply FP8."""
    monkeypatch.setattr(Chip, "rounds_to_fp8", False)
    monkeypatch.setattr(triton_rounding, "quantise", None)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("num_tokens", [1, 3, 70])
@pytest.mark.parametrize(
    ("rows", "depth", "input_scale"), [(128, 128, None), (1, 128, None), (1, 384, 0.02)]
)
def test_rows_stay_as_they_are_without_fp8(
    without_fp8, num_tokens: int, rows: int, depth: int, input_scale: float | None
) -> None:
    """Nothing is rounded: the weights' numbers, the smallest too, are exact in 16 bits."""
    weight = make_fp8(200, 384, rows=rows, depth=depth, input_scale=input_scale)
    hidden, bias = make_rows(num_tokens, 384), torch.randn(200)
    check(run_kernel(hidden, weight, bias), hidden, weight, bias, bound=4e-4)


def test_every_float8_weight_is_decoded(without_fp8) -> None:
    """All 254 numbers, by each kernel, one input at a time."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[numbers.float().isfinite()].contiguous()
    values = torch.zeros(254, 256, dtype=torch.uint8)
    values[:, 3] = numbers.view(torch.uint8)
    weight = Fp8(values=values.view(FP8), scales=torch.ones(2, 2), rows=128, depth=128)
    hidden = torch.zeros(2, 256).half()
    hidden[:, 3] = 1
    for rows in (hidden[:1], hidden):
        product = run_kernel(rows, weight)
        assert torch.equal(product.float(), numbers.float().expand(len(rows), -1))


@pytest.mark.parametrize("num_tokens", [2, 24, 40])
@pytest.mark.parametrize(("up_rows", "depth"), [(256, 128), (128, 128), (256, 256)])
def test_fp8_experts_without_fp8(without_fp8, num_tokens: int, up_rows: int, depth: int) -> None:
    rows = 128 if depth == 128 else 1
    up = make_fp8(3, up_rows, 256, rows=rows, depth=depth)
    down = make_fp8(3, 256, 128, rows=rows, seed=2)
    given = (*route(num_tokens, 3, 0.1), up, down)
    check_experts(run_mixture(as_activations(given[0]), *given[1:]), *given)


@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize("num_tokens", [1, 3, 40, 70])
def test_int8_gemm(num_tokens: int, input_scale: float | None) -> None:
    weight = make_int8(200, 384, input_scale=input_scale)
    hidden, bias = make_rows(num_tokens, 384), torch.randn(200)
    check(run_kernel(hidden, weight, bias), hidden, weight, bias, bound=4e-4)


def test_int8_sums_are_exact_however_they_are_cut() -> None:
    """A row has the same bits alone, by the kernel of one row, as among others, by the GEMM."""
    weight, hidden = make_int8(72, 4224), make_rows(33, 4224)
    hidden[0] = weight.values[0].sign()
    values, scales = quantise_int8(hidden)
    sums = values.long() @ weight.values.long().T
    assert sums.abs().max() > 1 << 24, "more than a sum in float32 holds"
    expected = sums.float() * (weight.scales.T * scales)
    assert torch.equal(run_kernel(hidden, weight), expected.half())
    for row in range(33):
        assert torch.equal(run_kernel(hidden[row : row + 1], weight)[0], expected[row].half())


@pytest.mark.parametrize(
    ("num_inputs", "group"), [(256, 32), (256, 64), (256, 128), (256, 256), (384, 384)]
)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_int4_gemm(num_tokens: int, num_inputs: int, group: int) -> None:
    weight = make_int4(72, num_inputs, group=group)
    hidden, bias = make_rows(num_tokens, num_inputs), torch.randn(72)
    check(run_kernel(hidden, weight, bias), hidden, weight, bias)


def test_one_multiplication_moves_a_number_of_e2m1_to_both_of_its_places() -> None:
    """As the PTX does which the interpreter does not run: two bytes of all values at a time."""
    low, high = torch.arange(1 << 16) & 255, torch.arange(1 << 16) >> 8
    for number, (_, factor) in enumerate(four_bits.MOVES):
        mask = 0x0F << 4 * number
        pairs = ((low & mask) | (high & mask) << 16) * factor & 0x81C081C0
        for place, byte in ((0, low), (16, high)):
            found = (pairs >> place & 0xFFFF).to(torch.int16)
            q = (byte >> 4 * number & 15).to(torch.int16)
            assert torch.equal(found, (((q & 8) << 12) | ((q & 7) << 6)).to(torch.int16))


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("block_k", [256, 512, 1024, 2048])
@pytest.mark.parametrize(
    "make",
    [
        *(partial(make_int4, group=group) for group in (32, 64, 128)),
        *(partial(make_fp4, group=group) for group in (16, 32)),
    ],
    ids=["int4 32", "int4 64", "int4 128", "nvfp4", "mxfp4"],
)
def test_a_row_meets_four_bits_in_pieces_of_any_size(
    make: Callable[..., Form], block_k: int, *, is_ahead: bool
) -> None:
    """In whole steps and in a last one that inputs do not fill."""
    for num_inputs in (block_k, 1152):
        weight, hidden = make(20, num_inputs), make_rows(1, num_inputs)
        tiles = GemvTiles(block_n=8, block_k=block_k, num_warps=1, is_ahead=is_ahead)
        check(gemv.run(multiplication(hidden, weight), tiles), hidden, weight, None)


@pytest.mark.parametrize(
    "make",
    [
        make_fp8,
        partial(make_fp8, rows=1, depth=128),
        make_fp4,
        *(partial(make_int4, group=group) for group in (32, 64, 128, 384)),
        lambda *shape: Raw(values=make_rows(*shape) / 16),
    ],
    ids=["fp8", "fp8 rows", "fp4", "int4 32", "int4 64", "int4 128", "int4 384", "raw"],
)
@pytest.mark.parametrize("num_inputs", [384, 2304])
def test_a_row_is_gated_as_it_is_multiplied(make: Callable[..., Form], num_inputs: int) -> None:
    """In one step of inputs and in several."""
    weight, hidden = make(144, num_inputs), make_rows(1, num_inputs) / 16
    if isinstance(weight, Raw):
        whole = hidden.float() @ weight.values.float().T
    else:
        whole = multiply(hidden.float(), weight)
    gated = run_kernel(hidden, weight, epilogue=Epilogue.GATED)
    assert gated is not None
    assert gated.shape == (1, 72)
    assert relative_error(gated, silu_mul(whole)) < 2e-3


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("num_tokens", [1, 3, 40, 70])
def test_fp4_gemm(num_tokens: int, group: int) -> None:
    weight = make_fp4(72, 384, group=group)
    hidden, bias = make_rows(num_tokens, 384), torch.randn(72)
    check(run_kernel(hidden, weight, bias), hidden, weight, bias)


@pytest.mark.parametrize("make", [make_fp8, make_int8, make_fp4, partial(make_int4, group=64)])
def test_parts_along_the_inputs_add_up(monkeypatch, make: Callable[..., Quantised]) -> None:
    """The interpreter has one SM, for which no product is cut."""
    weight, hidden, bias = make(72, 512), make_rows(3, 512), torch.randn(72)
    parts = torch.full((2, 3, 72), float("nan"))
    tiles = Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=2)
    monkeypatch.setattr(Multiplication, "output", lambda *_: parts)
    given = multiplication(hidden, weight, bias)
    output = gemm.run(given, SplitTiles(tiles=tiles, split_k=len(parts)))
    assert output.shape == (3, 2, 72)
    check(output, hidden, weight, bias)


@pytest.mark.parametrize(
    ("shape", "group"), [((72, 256), 32), ((72, 256), 64), ((72, 256), 256), ((3, 40, 256), 128)]
)
def test_four_bits_become_sixteen(shape: tuple[int, ...], group: int) -> None:
    """Of a matrix or a stack; in float16, for the interpreter has no arithmetic in bfloat16."""
    weight = make_int4(*shape, group=group)
    unpacked = library.unpack(weight, torch.float16)
    expected = weight.dequantise(torch.float32)
    torch.testing.assert_close(unpacked.float(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("shape", [(72, 256), (3, 40, 384)])
def test_every_float_of_four_bits_becomes_sixteen(shape: tuple[int, ...], group: int) -> None:
    weight = make_fp4(*shape, group=group)
    unpacked = library.unpack(weight, torch.float16)
    expected = weight.dequantise(torch.float32)
    torch.testing.assert_close(unpacked.float(), expected, rtol=1e-3, atol=2**-25)
    # Without factors to round, they are all of their digits.
    whole = replace(weight, factors=torch.ones_like(weight.factors))
    unpacked = library.unpack(whole, torch.float16)
    assert torch.equal(unpacked.float(), whole.dequantise(torch.float32))


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(
    "make", [make_fp8, make_int8, make_fp4, partial(make_int4, group=64), torch.randn]
)
def test_outputs_may_stand_beside_others(
    num_tokens: int, make: Callable[..., Quantised | Tensor]
) -> None:
    weight, hidden = make(72, 256), make_rows(num_tokens, 256) / 16
    wide = torch.full((num_tokens, 100), 7.0).half()
    target = wide[:, 8:80]
    if isinstance(weight, Tensor):
        weight = Raw(values=weight.half())
        expected = hidden @ weight.values.T
    else:
        expected = multiply(hidden, weight)
    assert run_kernel(hidden, weight, into=target) is target
    torch.testing.assert_close(target, expected, rtol=1e-2, atol=1e-2 * float(expected.std()))
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 80:] == 7).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "is_placed"), [(104, True), (100, False)])
def test_products_with_sixteen_bits_are_written_in_place(
    width: int, is_placed: bool, has_bias: bool
) -> None:
    """Where each row begins at a multiple of 16 bytes; elsewhere they are for the caller to
    copy."""
    weight, hidden = make_int4(72, 256, group=128), make_rows(3, 256) / 16
    bias = make_rows(1, 72)[0] if has_bias else None
    wide = torch.full((3, width), 7.0).half()
    target = wide[:, 8:80]
    given = multiplication(hidden, weight, bias, into=target)
    output = library.run_unpacked(given, None)
    assert (output is target) == is_placed
    expected = multiply(hidden, weight, bias)
    torch.testing.assert_close(output.float(), expected.float(), rtol=1e-2, atol=0.05)
    untouched = torch.cat((wide[:, :8], wide[:, 80:]), 1) if is_placed else wide
    assert (untouched == 7).all()


@pytest.mark.parametrize("depth", [128, 300])
def test_activations_are_rounded_as_defined(depth: int) -> None:
    hidden = make_rows(7, 300) * torch.logspace(-4, 3, 7)[:, None]
    hidden[2] = 0
    values, scales = triton_rounding.quantise(
        hidden.half(), depth, probe(hidden.device), num_padded=8
    )
    expected_values, expected_scales = quantise_rows(hidden.half(), depth)
    torch.testing.assert_close(scales.T[:7], expected_scales)
    assert values.view(torch.uint8)[:7].tolist() == expected_values.view(torch.uint8).tolist()


def test_activations_are_rounded_to_integers_as_defined() -> None:
    """Ties go to even integers, the largest number of a row to 127 or its negative."""
    hidden = make_rows(7, 300) * torch.logspace(-4, 3, 7)[:, None]
    hidden[2] = 0
    hidden[3, :6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -127.0, 126.5])
    hidden[3, 6:] = 1
    values, scales = triton_rounding.quantise(hidden, 300, probe(hidden.device), dtype=torch.int8)
    expected_values, expected_scales = quantise_int8(hidden)
    assert values[3, :6].tolist() == [0, 2, 2, 0, -127, 126]
    assert torch.equal(scales.T, expected_scales)
    assert torch.equal(values, expected_values)


def test_rows_are_gated_as_they_are_rounded() -> None:
    gate_up, chip = make_rows(3, 512), probe(torch.device("cpu"))
    expected = triton_rounding.quantise(silu_mul(gate_up), 128, chip)
    values, scales = triton_rounding.quantise(gate_up, 128, chip, is_gated=True)
    torch.testing.assert_close(scales, expected[1], rtol=1e-3, atol=0)
    wide, wanted = (each.view(torch.float8_e4m3fn).float() for each in (values, expected[0]))
    assert ((wide - wanted).abs() > wanted.abs() / 8).float().mean() == 0


def test_every_float8_number_is_read_and_written_without_its_unit() -> None:
    """As chips do that have no arithmetic in float8, and the interpreter."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].view(2, -1)
    assert numbers.abs().amax(1).tolist() == [448, 448], "so their scale is 1"
    between = numbers + 0.37 * (numbers.roll(-1, 1) - numbers)
    between[:, :1] = 448
    for each in (numbers, between):
        values, scales = triton_rounding.quantise(each, 127, probe(numbers.device))
        assert scales.tolist() == [[1, 1]]
        assert torch.equal(values.float(), each.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("num_tokens", [2, 16, 24])
@pytest.mark.parametrize(
    ("up_rows", "rows", "depth", "input_scale"),
    [
        (256, 128, 128, None),
        (256, 1, 128, None),
        (128, 1, 256, None),
        (256, 1, 256, 0.02),
    ],
    ids=["blocks", "rows", "squared relu", "static"],
)
def test_fp8_experts(
    num_tokens: int, up_rows: int, rows: int, depth: int, input_scale: float | None
) -> None:
    up = make_fp8(3, up_rows, 256, rows=rows, depth=depth, input_scale=input_scale)
    down = make_fp8(3, 256, 128, rows=rows, input_scale=input_scale, seed=2)
    given = (*route(num_tokens, 3, 0.1), up, down)
    check_experts(run_mixture(as_activations(given[0]), *given[1:]), *given)


@pytest.mark.parametrize("num_tokens", [2, 24, 180])
@pytest.mark.parametrize(
    ("up_rows", "input_scales"),
    [(256, (None, None)), (128, (None, None)), (256, (1e-4, 1e-3))],
    ids=["gated", "squared relu", "static"],
)
def test_int8_experts(
    num_tokens: int, up_rows: int, input_scales: tuple[float | None, float | None]
) -> None:
    up = make_int8(3, up_rows, 256, input_scale=input_scales[0])
    down = make_int8(3, 256, 128, seed=2, input_scale=input_scales[1])
    given = (*route(num_tokens, 3, 0.1), up, down)
    check_experts(run_mixture(as_activations(given[0]), *given[1:]), *given)


@pytest.mark.parametrize("is_swapped", [False, True], ids=["rows left", "weights left"])
@pytest.mark.parametrize("up_rows", [256, 128], ids=["gated", "squared relu"])
@pytest.mark.parametrize(
    ("make", "group"), [(make_int4, 128), (make_int4, 32), (make_int4, 256), (make_fp4, 16)]
)
def test_four_bits_may_be_scaled_before_they_are_multiplied(
    make: Callable[..., Quantised], group: int, up_rows: int, *, is_swapped: bool
) -> None:
    up = make(3, up_rows, 256, group=group)
    down = make(3, 256, 128, group=min(group, 128), seed=2)
    given = (*route(40, 3, 0.1), up, down)
    tiles = Tiles(
        block_m=16,
        block_n=64,
        block_k=128,
        num_warps=4,
        num_stages=2,
        is_swapped=is_swapped,
        scales_first=True,
    )
    with poisoned_outputs():
        check_experts(grouped.run_tiles(as_routed(*given), tiles, tiles), *given)


@pytest.mark.parametrize("num_tokens", [2, 24, 60])
@pytest.mark.parametrize(("up_rows", "group"), [(256, 32), (256, 128), (128, 64)])
def test_int4_experts(num_tokens: int, up_rows: int, group: int) -> None:
    up = make_int4(3, up_rows, 256, group=group)
    down = make_int4(3, 256, 128, group=group, seed=2)
    given = (*route(num_tokens, 3, 0.01), up, down)
    for limit in (0.0, 0.02):
        mixed = run_mixture(as_activations(given[0]), *given[1:], limit=limit)
        check_experts(mixed, *given, limit=limit)


@pytest.mark.parametrize("num_tokens", [2, 24, 60, 180])
@pytest.mark.parametrize(("up_rows", "group"), [(256, 16), (128, 16), (256, 32)])
def test_fp4_experts(num_tokens: int, up_rows: int, group: int) -> None:
    up = make_fp4(3, up_rows, 256, group=group)
    down = make_fp4(3, 256, 128, group=group, seed=2)
    given = (*route(num_tokens, 3), up, down)
    check_experts(run_mixture(as_activations(given[0]), *given[1:]), *given)


@pytest.mark.parametrize("up_rows", [512, 256])
def test_tall_experts(up_rows: int) -> None:
    """Their activations between are rounded in blocks, as those of few rows are."""
    up, down = make_fp8(2, up_rows, 256), make_fp8(2, 256, 256, seed=2)
    hidden, shares, experts = route(75, 3, 0.1)
    experts = experts % 2
    routed = as_routed(hidden, shares, experts, up, down)
    groups = group_many(experts, 2, grouped_large.BLOCK_M)
    rows = triton_rounding.quantise(hidden, 128, routed.chip)
    active = grouped_large.new_rounded(routed, 150)
    active[1].fill_(float("nan"))
    output = hidden.new_full((75, 2, 256), float("nan"))
    grouped_large.project_up(rows, routed, active, groups)
    grouped_large.project_down(active, routed, output, groups)
    check_experts(output, hidden, shares, experts, up, down)


def test_experts_that_no_kernel_takes_do_not_ask_what_was_chosen() -> None:
    """Graphs record them; what has no values cannot be asked."""
    up, down = (to("meta", make_int4(3, *shape, group=32)) for shape in ((128, 64), (64, 64)))
    hidden, shares, experts = (each.to("meta") for each in route(5, 3))
    mixed = experts_reference.mix_quantised(hidden[:, :64], shares, experts, up, down)
    assert mixed.shape == (5, 1, 64)


@pytest.mark.parametrize(("arch", "native"), [((8, 0), False), ((8, 9), True), ((0, 0), False)])
def test_a_chip_without_float8_is_told(arch: tuple[int, int], native: bool) -> None:
    chip = Chip(arch="sm", capability=arch, is_amd=False, num_sms=108, shared_bytes=166912)
    assert chip.has_fp8 == native


@pytest.mark.parametrize("num_tokens", [44, 45, 99])
def test_products_read_what_a_norm_rounded(monkeypatch, num_tokens: int) -> None:
    """The same bits as where they round it themselves, and no launch of their own for it; the last
    line of rows need not be full."""
    monkeypatch.setattr(emit, "reads_rounded", lambda _: True)
    hidden, shares, experts = route(num_tokens, 3, 0.1)
    weight, up, down = make_fp8(256, 256), make_fp8(3, 256, 256), make_fp8(3, 256, 128, seed=2)
    scale = torch.full((256,), 4e-3)
    normed = norm_triton.add_norm(hidden, None, scale, 1e-6, emit=Emit.BOTH)[1]
    plain = as_activations(normed.values)
    chip = probe(hidden.device)
    lines = triton_rounding.round_lines(plain, weight, chip)
    product = run_kernel(plain, weight)
    mixed = run_mixture(plain, shares, experts, up, down)
    with monkeypatch.context() as only:
        only.setattr(triton_rounding, "quantise", None)
        found = triton_rounding.round_lines(normed, weight, chip)
        assert torch.equal(run_kernel(normed, weight), product)
    assert [each.shape for each in found] == [each.shape for each in lines]
    assert torch.equal(found[0][:num_tokens].float(), lines[0][:num_tokens].float())
    assert torch.equal(found[1][:, :num_tokens], lines[1][:, :num_tokens])
    assert torch.equal(run_mixture(normed, shares, experts, up, down), mixed)


@pytest.mark.parametrize("block_rows", [8, 16])
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(1, 1, 1), (8, 2, 30), (16, 3, 7), (33, 9, 17)]
)
def test_gather(num_tokens: int, num_chosen: int, num_experts: int, block_rows: int) -> None:
    """Every routed token's row once, in its expert's blocks, by token; all choose the last one."""
    random = torch.Generator().manual_seed(num_tokens)
    others = [torch.randperm(max(1, num_experts - 1), generator=random) for _ in range(num_tokens)]
    experts = torch.stack([each[:num_chosen] for each in others]).int()
    experts[:, -1] = num_experts - 1
    rows = torch.randint(0, 255, (num_tokens + 3, 384), generator=random, dtype=torch.uint8)
    scales = torch.randn(3, num_tokens + 3, generator=random)
    gathered = triton_gathering.gather(rows.view(FP8), scales, experts, num_experts, block_rows)
    count = int(gathered.count)
    assert (gathered.counters[:count] == 0).all()
    routed = gathered.routed[: count * block_rows]
    filled = (routed >= 0).nonzero()[:, 0]
    order = experts.flatten().sort(stable=True).indices
    assert torch.equal(routed[filled].long(), order)
    owners = gathered.experts[:count].repeat_interleave(block_rows)
    assert torch.equal(owners[filled], experts.flatten()[order])
    assert len(filled.div(block_rows, rounding_mode="floor").unique()) == count
    expected = rows[order // num_chosen]
    assert torch.equal(gathered.rows.view(torch.uint8)[filled], expected)
    assert torch.equal(gathered.scales[:, filled], scales[:, order // num_chosen])
    plain = rows[:num_tokens, :256].contiguous().view(torch.float16)
    gathered = triton_gathering.gather(plain, None, experts, num_experts, block_rows)
    assert gathered.scales is None
    assert torch.equal(gathered.routed[: count * block_rows], routed)
    kept = gathered.rows.view(torch.int16)[filled]
    assert torch.equal(kept, plain.view(torch.int16)[order // num_chosen])


@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_rows_are_added_up_by_group(num_rows: int) -> None:
    rows = make_rows(num_rows, 512)[:, :384]
    added = triton_rounding.sum_rows(rows, 64)
    torch.testing.assert_close(added, rows.float().view(num_rows, 6, 64).sum(2).T)
