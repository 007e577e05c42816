"""The kernels of hyper-connections, interpreted, against the definitions."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels import residual
from milepost.kernels.residual import triton
from tests.numbers import relative_error


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("num_tokens", "num_streams", "size"), [(1, 4, 70), (5, 3, 1030)])
@pytest.mark.parametrize("num_parts", [None, 1, 3])
@pytest.mark.parametrize("is_expanded", [False, True])
def test_each_is_as_defined(
    num_tokens: int,
    num_streams: int,
    size: int,
    num_parts: int | None,
    is_expanded: bool,
    dtype: torch.dtype,
    bound: float,
) -> None:
    """Streams may still be one embedding, logits stand beside others, and outputs be in parts."""
    streams = randn(num_tokens, num_streams, size).to(dtype)
    if is_expanded:
        streams = streams[:, :1].expand(-1, num_streams, -1)
    scale, logits = randn(num_streams, size), randn(num_tokens, num_streams * size + 9).to(dtype)
    normed = triton.norm_streams(streams, scale, 1e-6)
    assert relative_error(normed, residual.norm_streams(streams, scale, 1e-6)) < bound
    mixing = logits[:, 9:]
    assert (
        relative_error(
            triton.mix_streams(normed, mixing), residual.mix_streams(normed, mixing.contiguous())
        )
        < bound
    )
    output = randn(num_tokens, *[num_parts] * (num_parts is not None), size)
    output = output.to(dtype) if num_parts is None else output
    found = triton.inject(streams, output, logits[:, :num_streams])
    assert relative_error(found, residual.inject(streams, output, logits[:, :num_streams])) < bound
    assert found.dtype == dtype
