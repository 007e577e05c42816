"""The Triton norms against the reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels import products
from milepost.kernels.layout import emit
from milepost.kernels.layout.emit import Emit, as_activations
from milepost.kernels.norm import activations, reference, triton
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.portable import rounding
from tests.numbers import relative_error

SIZE, EPS = 70, 1e-6


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("num_parts", [None, 0, 1, 4])
def test_add_norm(num_tokens: int, num_parts: int | None) -> None:
    """Without a delta, with a plain one (0) and with parts; rows of both may lie apart."""
    hidden, scale = randn(num_tokens, 2 * SIZE)[:, :SIZE], randn(SIZE)
    delta = None
    if num_parts is not None:
        delta = randn(num_tokens, max(num_parts, 1), 3 * SIZE)[:, :, SIZE : 2 * SIZE]
        delta = delta if num_parts else delta[:, 0]
    multiplier = 1.0 if num_parts == 1 else 0.22
    arguments = hidden, delta, scale, EPS, multiplier
    total, normed = triton.add_norm(*arguments)
    expected_total, expected_normed = reference.add_norm(*arguments)
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(normed, expected_normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_parts", [0, 1, 4])
def test_a_delta_may_have_a_norm_of_its_own(num_parts: int, dtype: torch.dtype) -> None:
    """The same bits as from a launch of its own, where there is no order of parts."""
    hidden, scale, own = randn(5, SIZE).to(dtype), randn(SIZE), randn(SIZE).abs() + 1
    delta = randn(5, max(num_parts, 1), 2 * SIZE)[:, :, SIZE:]
    delta = delta if num_parts else delta[:, 0].to(dtype)
    found = triton.add_norm(hidden, delta, scale, EPS, 0.22, delta_scale=own)
    expected = reference.add_norm(hidden, delta, scale, EPS, 0.22, delta_scale=own)
    first, rest = (delta, None) if not num_parts else (delta[:, 0], delta[:, 1:])
    normed = triton.add_norm(first, rest if num_parts > 1 else None, own, EPS)[1]
    alone = triton.add_norm(hidden, normed, scale, EPS, 0.22)
    for own_, wanted, same in zip(found, expected, alone, strict=True):
        assert relative_error(own_, wanted) < (1e-6 if dtype == torch.float32 else 1e-3)
        assert torch.equal(own_, same) or num_parts > 1


def test_what_is_normed_is_the_rounded_sum() -> None:
    hidden, delta = randn(3, SIZE).half(), randn(4, SIZE)[1:].half()
    total, normed = triton.add_norm(hidden, delta, torch.ones(SIZE), EPS)
    again, expected = triton.add_norm(total, None, torch.ones(SIZE), EPS)
    assert torch.equal(total, hidden + delta)
    assert again is total
    assert torch.equal(normed, expected)


@pytest.mark.parametrize("size", [5, 1030])
def test_activations(size: int) -> None:
    wide = randn(3, 2 * size + 7)
    gate_up = wide[:, : 2 * size]
    for limit in (0.0, 0.7):
        expected = reference.silu_mul(gate_up, limit)
        torch.testing.assert_close(activations.silu_mul(gate_up, limit), expected)
    assert expected.max() == pytest.approx(0.49)
    hidden = wide[:, :size]
    torch.testing.assert_close(activations.relu_squared(hidden), reference.relu_squared(hidden))


def test_heads_are_gated() -> None:
    hidden, gate = randn(3, 5, 18), randn(3, 9)[:, 2:7]
    expected = reference.gate_heads(hidden.clone(), gate)
    torch.testing.assert_close(activations.gate_heads(hidden, gate), expected)


@pytest.mark.parametrize("size", [128, 384, 1024])
def test_a_norm_brings_its_rounding_along(monkeypatch, size: int) -> None:
    """The same numbers as a launch of their own makes of it, in whole lines of rows."""
    monkeypatch.setattr(emit, "reads_rounded", lambda _: True)
    hidden, delta, scale = randn(5, size).half(), randn(5, 2, size), randn(size)
    expected = triton.add_norm(hidden, delta, scale, EPS)
    total, found = triton.add_norm(hidden, delta, scale, EPS, emit=Emit.BOTH)
    assert torch.equal(total, expected[0])
    assert torch.equal(found.values, expected[1])
    own = found.fp8
    values, scales = rounding.quantise(expected[1], 128, probe(hidden.device), num_padded=8)
    assert own.values.shape == values.shape
    assert own.scales.shape == scales.shape
    assert torch.equal(own.values[:5].view(torch.uint8), values[:5].view(torch.uint8))
    assert torch.equal(own.scales[:, :5], scales[:, :5])
    for rows in (hidden[:1], hidden.float(), randn(5, size + 1).half()):
        scale = torch.ones(rows.shape[1])
        normed = triton.add_norm(rows, None, scale, EPS, emit=Emit.FP8)[1]
        assert as_activations(normed).fp8 is None


def test_the_norm_of_one_row_is_rounded_if_it_is_batch_invariant(monkeypatch) -> None:
    monkeypatch.setattr(emit, "reads_rounded", lambda _: True)
    hidden, scale = randn(5, 256).half(), randn(256)
    how = {"emit": Emit.BOTH, "order": SumOrder.FIXED}
    every = triton.add_norm(hidden, None, scale, EPS, **how)[1]
    one = triton.add_norm(hidden[2:3], None, scale, EPS, **how)[1]
    assert torch.equal(one.values, every.values[2:3])
    assert torch.equal(one.fp8.values[:1].float(), every.fp8.values[2:3].float())
    assert torch.equal(one.fp8.scales[:, :1], every.fp8.scales[:, 2:3])


@pytest.mark.parametrize("num_tokens", [64, 66])
def test_many_rounded_rows_may_be_alone(monkeypatch, num_tokens: int) -> None:
    """Some products of few read the rows themselves."""
    monkeypatch.setattr(emit, "reads_rounded", lambda _: True)
    hidden, delta, scale = randn(num_tokens, 256).half(), randn(num_tokens, 256), randn(256)
    kept = triton.add_norm(hidden, delta, scale, EPS, emit=Emit.BOTH)
    total, normed = triton.add_norm(hidden, delta, scale, EPS, emit=Emit.FP8)
    assert torch.equal(total, kept[0])
    assert kept[1].values is not None
    assert (normed.values is not None) == (num_tokens == 64)
    pairs = zip(normed.fp8.filled, kept[1].fp8.filled, strict=True)
    assert all(torch.equal(ours.float(), theirs.float()) for ours, theirs in pairs)
    if num_tokens == 66:
        with pytest.raises(AssertionError, match="who reads values is known"):
            emit.values_of(normed)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize(("size", "num_outputs"), [(70, 5), (512, 37), (4096, 6)])
def test_a_norm_and_a_product(monkeypatch, num_parts: int, size: int, num_outputs: int) -> None:
    """One launch makes what two make; it writes no more than its outputs."""
    hidden, scale, weight = randn(1, size).half(), randn(size), randn(num_outputs, size).half()
    delta = randn(1, num_parts, size).half() if num_parts else None
    if num_parts == 1:
        delta = delta[:, 0]
    wide = torch.full((1, num_outputs + 2), 7.0, dtype=torch.float16)
    monkeypatch.setattr(products, "runs_triton", lambda _: True)
    form = products.Raw(values=weight)
    assert products.norms_too(hidden, form)
    how = scale, EPS, 0.5, weight, wide[:, 1:-1]
    total, normed = triton.add_norm_and_multiply(hidden, delta, *how)
    exact = None if delta is None else delta.double()
    expected = reference.add_norm(hidden.double(), exact, scale.double(), EPS, 0.5)
    assert relative_error(total, expected[0]) < 2e-3
    assert relative_error(normed, expected[1]) < 2e-3
    product = normed.float() @ weight.float().t()
    torch.testing.assert_close(wide[:, 1:-1].float(), product, rtol=1e-2, atol=1e-2)
    assert wide[0, 0] == wide[0, -1] == 7
    assert not products.norms_too(hidden.expand(2, -1), form)
    assert not products.norms_too(hidden, products.Raw(values=weight.float()))
