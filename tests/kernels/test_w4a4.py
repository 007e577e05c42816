"""Rounding to e2m1 with scales of groups, in plain torch: the definition against its own words."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from milepost.kernels.products.forms.quantised import multiply, nth, unpack, widen_e2m1
from milepost.kernels.products.forms.w4a4 import PAIR, encode_e2m1, round_e2m1
from tests.kernels.quantised_cases import make_rows, make_w4a4, pack_rows

SIZES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
ONE = torch.ones(())


def test_all_codes_come_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    numbers = widen_e2m1(codes)
    assert numbers.tolist() == [*SIZES, *(-size for size in SIZES)]
    assert torch.equal(encode_e2m1(numbers), codes), "the zero with a sign, too"


def test_ties_go_to_even_codes() -> None:
    for code, (below, above) in enumerate(pairwise(SIZES)):
        middle = torch.tensor((below + above) / 2)
        around = torch.stack((middle, *(middle.nextafter(torch.tensor(to)) for to in (0.0, 9.0))))
        even = code + code % 2
        assert encode_e2m1(around).tolist() == [even, code, code + 1]
        assert encode_e2m1(-around).tolist() == [even + 8, code + 8, code + 9]


def test_large_numbers_saturate_and_nan_is_a_zero() -> None:
    numbers = torch.tensor([6.9, 1e30, torch.inf, -torch.inf, torch.nan])
    assert (encode_e2m1(numbers) & 7).tolist() == [7, 7, 7, 7, 0]
    assert encode_e2m1(numbers)[3] == 15


def test_scales_of_sixteen_are_float8_multiples_of_a_factor() -> None:
    rows = torch.zeros(1, 64)
    rows[0, 3], rows[0, 16], rows[0, 40] = 6 * 0.21 * 0.5, 7000.0, torch.nan
    codes, scales = round_e2m1(rows, 16, torch.tensor(0.5))
    # 0.21 is 0.203125 in float8, and 7000 is beyond 6 * 448 * 0.5: it is cut to that.
    assert scales[0, [0, 1, 3]].tolist() == [0.5 * 0.203125, 224.0, 0.0]
    assert scales[0, 2].isnan()
    assert codes[0, 3] == codes[0, 16] == 7
    assert codes.count_nonzero() == 2


@pytest.mark.parametrize(
    ("largest", "scale", "code"),
    [(1.0, 0.25, 6), (1.74, 0.25, 7), (1.75, 0.5, 6), (6.0, 1.0, 7), (7.0, 2.0, 6), (0.0, 0, 0)],
)
def test_scales_of_thirty_two_are_powers_of_two(largest: float, scale: float, code: int) -> None:
    """A number that rounds up to a power of two has that power's scale."""
    rows = torch.zeros(1, 32)
    rows[0, 5] = largest
    codes, scales = round_e2m1(rows, 32, ONE)
    assert scales.item() == (scale or 2.0**-126)
    assert codes[0, 5] == code


@pytest.mark.parametrize("group", [16, 32])
def test_rounded_rows_are_near(group: int) -> None:
    weight = make_w4a4(8, 256, group=group)
    rows = make_rows(7, 256).float()
    rounded = weight.round_inputs(rows)
    groups = rows.unflatten(-1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True)
    # A sixth of the largest number, one unit of e2m1 there, and what a scale loses by rounding.
    assert ((rounded.unflatten(-1, (-1, group)) - groups).abs() <= most * 0.3).all()
    error = (rounded - rows).norm() / rows.norm()
    assert 0.03 < error < 0.15


@pytest.mark.parametrize("group", [16, 32])
def test_kernels_read_the_numbers_of_the_definition(group: int) -> None:
    weight, rows = make_w4a4(8, 256, group=group), make_rows(3, 256)
    packed, bits = pack_rows(rows, weight)
    codes, scales = round_e2m1(rows, group, weight.input_factor)
    assert torch.equal(unpack(packed, PAIR), codes)
    if group == 16:
        expected = bits.view(torch.float8_e4m3fn).float() * weight.input_factor
    else:
        expected = torch.exp2(bits.float() - 127)
    assert torch.equal(expected.T, scales)


def test_a_byte_holds_neighbours_and_experts_share_a_factor() -> None:
    weight = make_w4a4(2, 8, 128)
    numbers = widen_e2m1(torch.stack((weight.packed & 15, weight.packed >> 4), -1).flatten(-2))
    scales = weight.scales.float().repeat_interleave(16, -1) * weight.factors[..., None]
    assert torch.allclose(weight.dequantise(torch.float32), numbers * scales)
    rows = make_rows(2, 128).float()
    product = multiply(rows, nth(weight, 1))
    expected = weight.round_inputs(rows) @ weight.dequantise(torch.float32)[1].T
    assert torch.allclose(product, expected)
