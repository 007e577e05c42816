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
