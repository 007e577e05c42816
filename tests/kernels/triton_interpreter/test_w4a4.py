"""Products of rows rounded to e2m1 with e2m1 weights, in Triton's interpreter, which is taught the
instruction here: what Triton's documentation of `dot_scaled` says it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from milepost.kernels.layout.emit import as_activations
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.products.forms.w4a4 import W4A4
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
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dot_scaled(
    semantic: Any, left: Any, left_scale: Any, kind: str, right: Any, right_scale: Any, *rest: Any
) -> Any:
    """Products of e2m1 pairs, the first in the low half of a byte, with scales for 16 of them in
    float8 or for 32 in e8m0."""
    acc = rest[1]
    assert kind == rest[0] == "e2m1"
    numbers = []
    for codes, scale in ((left.handle.data, left_scale), (right.handle.data.T, right_scale)):
        pairs = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
        bits = scale.handle.data
        if scale.dtype.is_fp8e4nv():
            scales = torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).double().numpy()
        else:
            scales = np.where(bits == 255, np.nan, 2.0 ** (bits.astype(float) - 127))
        group = 16 if scale.dtype.is_fp8e4nv() else 32
        assert scales.shape == (len(codes), pairs.shape[1] // group)
        numbers.append(E2M1[pairs] * scales.repeat(group, 1))
    sums = (numbers[0] @ numbers[1].T).astype(np.float32) + acc.handle.data
    return semantic.tensor(interpreter.TensorHandle(sums, acc.handle.dtype), acc.type)


@pytest.fixture(autouse=True)
def chip_with_fp4(monkeypatch):
    monkeypatch.setattr(interpreter.TritonSemantic, "dot_scaled", dot_scaled)
    monkeypatch.setattr(Chip, "has_fp4", True)
    forget()
    yield
    monkeypatch.undo()
    forget()


def make_odd_rows(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Rows of all sizes, with zeros, ties, infinite numbers and NaN among them."""
    rows = make_rows(num_rows, num_inputs).float()
    rows[0, :32] = 0
    rows[0, 32:40] = torch.tensor([6, 5, 3.5, 2.5, -1.75, 0.75, 0.25, -0.25])
    rows[-1, 64] = float("inf")
    rows[-1, 100] = float("nan")
    rows[-1, 130] = 3e-8
    return rows


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_the_definition_says(group: int, dtype: torch.dtype) -> None:
    weight = make_w4a4(8, 1408, group=group)
    rows = make_odd_rows(5, 1408).to(dtype)
    codes, scales = round_rows(rows, weight, probe(rows.device), are_few=True)
    expected_codes, expected_scales = pack_rows(rows, weight)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes & 0x77, expected_codes & 0x77)
    is_number = (expected_codes & 0x77) != 0
    assert torch.equal(codes[is_number], expected_codes[is_number])


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs"), [(1, 200, 256), (3, 72, 1152), (70, 200, 384)]
)
@pytest.mark.parametrize("group", [16, 32])
def test_gemm(num_tokens: int, num_outputs: int, num_inputs: int, group: int) -> None:
    weight = make_w4a4(num_outputs, num_inputs, group=group)
    hidden, bias = make_rows(num_tokens, num_inputs), torch.randn(num_outputs)
    check(run_kernel(hidden, weight, bias), hidden, weight, bias)


@pytest.mark.parametrize("num_tokens", [1, 24, 40])
@pytest.mark.parametrize(("up_rows", "group"), [(256, 16), (128, 32)])
def test_experts(num_tokens: int, up_rows: int, group: int) -> None:
    up = make_w4a4(3, up_rows, 256, group=group)
    down = make_w4a4(3, 256, 128, group=group, seed=2)
    given = (*route(num_tokens, 3, 0.1), up, down)
    check_experts(run_mixture(as_activations(given[0]), *given[1:]), *given)


def test_a_nan_stays_in_its_row() -> None:
    weight = make_w4a4(40, 256)
    hidden = make_rows(3, 256)
    hidden[1, 17] = float("nan")
    product = run_kernel(hidden, weight)
    assert product[1].isnan().all()
    assert product[[0, 2]].isfinite().all()


def test_other_chips_have_no_such_kernel(monkeypatch) -> None:
    monkeypatch.setattr(Chip, "has_fp4", False)
    forget()
    assert run_kernel(make_rows(3, 256), make_w4a4(40, 256)) is None
    assert isinstance(make_w4a4(40, 256), W4A4)
