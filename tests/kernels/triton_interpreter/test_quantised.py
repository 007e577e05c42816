"""The Triton kernels of quantised weights against the definition, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.kernels.device import Chip, probe
from milepost.kernels.quantised import Fp8, quantise_fp8, reference, triton, triton_fp8
from milepost.kernels.quantised.forms import multiply, quantise_rows
from tests.numbers import relative_error


def make_fp8(*shape: int, rows: int = 128, depth: int = 128, seed: int = 0) -> Fp8:
    random = torch.Generator().manual_seed(seed)
    raw = torch.randn(shape, generator=random).view(-1, *shape[-2:])
    made = []
    for weights in raw:
        if depth == 128:
            made.append(quantise_fp8(weights, rows))
        else:
            scales = weights.abs().amax(1, keepdim=True) / 448
            made.append(((weights / scales).to(torch.float8_e4m3fn), scales))
    values, scales = (torch.stack(each) for each in zip(*made, strict=True))
    lead = shape[:-2]
    return Fp8(
        values=values.view(*lead, *values.shape[1:]),
        scales=scales.view(*lead, *scales.shape[1:]),
        rows=rows,
        depth=depth,
    )


def make_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.parametrize(
    ("num_tokens", "rows", "depth"), [(3, 128, 128), (70, 128, 128), (3, 1, 128), (33, 1, 256)]
)
def test_fp8_gemm(num_tokens: int, rows: int, depth: int) -> None:
    weight, hidden = make_fp8(200, 256, rows=rows, depth=depth), make_rows(num_tokens, 256)
    bias = torch.randn(200)
    product = triton.partials(hidden, weight, bias, lets_next_start=True)
    product = product.sum(1) if product.dim() == 3 else product
    assert relative_error(product, multiply(hidden, weight, bias)) < 2e-3


@pytest.mark.parametrize("depth", [128, 300])
def test_activations_are_rounded_as_defined(depth: int) -> None:
    hidden = make_rows(7, 300) * torch.logspace(-4, 3, 7)[:, None]
    hidden[2] = 0
    weight = make_fp8(8, 384 if depth == 128 else 300, rows=1, depth=depth)
    values, scales = triton_fp8.quantise(hidden.half(), weight, probe(hidden.device))
    expected_values, expected_scales = quantise_rows(hidden.half(), depth)
    torch.testing.assert_close(scales, expected_scales)
    assert values.view(torch.uint8).tolist() == expected_values.view(torch.uint8).tolist()


def test_every_float8_number_is_read_and_written_without_its_unit() -> None:
    """As chips do that have no arithmetic in float8, and the interpreter."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].view(2, -1)
    scale = torch.tensor(1.0)
    weight = Fp8(values=numbers, scales=numbers, rows=1, depth=127, input_scale=scale)
    values, _ = triton_fp8.quantise(numbers, weight, probe(numbers.device))
    assert torch.equal(values.float(), numbers)
    between = numbers + 0.37 * (numbers.roll(-1, 1) - numbers)
    values, _ = triton_fp8.quantise(between, weight, probe(numbers.device))
    assert torch.equal(values.float(), between.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(("num_tokens", "rows"), [(9, 1), (30, 128)])
def test_fp8_experts(num_tokens: int, rows: int) -> None:
    up, down = make_fp8(3, 256, 128, rows=rows), make_fp8(3, 128, 128, rows=rows, seed=2)
    random = torch.Generator().manual_seed(3)
    hidden = make_rows(num_tokens, 128) * 0.1
    experts = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(num_tokens)])
    shares = torch.rand(num_tokens, 2, generator=random).half()
    mixed = triton.mix(hidden, shares, experts.int(), up, down).float().sum(1)
    expected = reference.mix(hidden.float(), shares.float(), experts, up, down)[:, 0]
    assert relative_error(mixed, expected) < 2e-2, "activations between are rounded twice"


@pytest.mark.parametrize(("arch", "has_fp8"), [((8, 0), False), ((8, 9), True), ((0, 0), False)])
def test_a_chip_without_float8_is_told(arch: tuple[int, int], has_fp8: bool) -> None:
    chip = Chip(arch="sm", capability=arch, is_amd=False, num_sms=108, shared_bytes=166912)
    assert triton_fp8.has_fp8(chip) == has_fp8
