"""The Triton norms against the reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.norm import reference, triton

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
    torch.testing.assert_close(triton.silu_mul(gate_up), reference.silu_mul(gate_up))
    hidden = wide[:, :size]
    torch.testing.assert_close(triton.relu_squared(hidden), reference.relu_squared(hidden))
