"""Attention over depth: the kernel beside the definition."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.residual import mix, triton
from tests.numbers import relative_error


@pytest.mark.parametrize("num_parts", [None, 0, 1, 3], ids=str)
@pytest.mark.parametrize(("num_sources", "size"), [(1, 24), (2, 100), (5, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixtures_are_those_of_the_definition(num_parts, num_sources, size, dtype):
    """A delta may be none, whole (0), or in parts; rows of the stream may lie apart."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    room = draw(7, num_sources + 2, size).to(dtype)
    delta = None
    if num_parts is not None:
        delta = draw(7, *[num_parts] * (num_parts > 0), size)
        delta = delta if num_parts else delta.to(dtype)
    given = delta, 1 + draw(size), draw(size) * 0.3, 1e-5
    own, expected = room.clone(), room.clone()
    found = triton.mix(own[:, 1:-1], *given)
    wanted = mix(expected[:, 1:-1], *given)
    max_error = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative_error(found, wanted) < max_error
    assert relative_error(own, expected) < max_error
    assert torch.equal(own[:, [0, -1]], room[:, [0, -1]]), "only the last source is written"
    assert found.dtype == dtype
