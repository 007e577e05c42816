"""The Triton kernel that takes rows against torch's indexing, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.rows import triton


@pytest.mark.parametrize("size", [1, 70, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_take(size: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    table = torch.randn(9, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    places = torch.tensor([8, 0, 3, 3, 7], dtype=kind)
    assert torch.equal(triton.take(table, places), table[places])
    assert torch.equal(triton.take(table, places[1:2]), table[:1])


def test_take_refuses_rows_that_lie_apart() -> None:
    table = torch.zeros(4, 6)[:, :3]
    with pytest.raises(ValueError, match="table"):
        triton.take(table, torch.tensor([1]))
