"""The Triton search for a nucleus against a sort, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.sampling import triton
from tests.kernels.nuclei import kept_by_sorting, random_logits


@pytest.mark.parametrize("vocab_size", [5, 300])
@pytest.mark.parametrize("share", [1e-6, 0.3, 0.95])
def test_nucleus_floor(vocab_size: int, share: float) -> None:
    scaled = random_logits(4, vocab_size)
    floor = torch.tensor([-torch.inf, -torch.inf, -0.7, -3.0])[:, None]
    expected, wanted = kept_by_sorting(scaled, floor, share)
    known, is_known = torch.full((4, 1), -1.5), torch.tensor([0, 0, 0, 1])[:, None].bool()
    found = triton.nucleus_floor(scaled, floor, wanted, known, is_known)
    assert found[3] == -1.5
    assert torch.equal((scaled >= found)[:3], expected[:3])


@pytest.mark.parametrize("vocab_size", [5, 300, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_likeliest(vocab_size: int, dtype: torch.dtype) -> None:
    """Of equal logits the first, in another block too; rows may lie apart."""
    logits = random_logits(6, vocab_size + 3).to(dtype)[:, :vocab_size]
    logits[1], logits[2] = 0.5, -torch.inf
    logits[3, [1, 4, vocab_size - 1]] = 9.0
    assert torch.equal(triton.likeliest(logits), logits.argmax(-1))


def test_likeliest_of_nothing_is_a_token() -> None:
    found = triton.likeliest(torch.full((2, 300), torch.nan))
    assert ((found >= 0) & (found < 300)).all()
