"""Sampling on a GPU: the same tokens as by sorting, and nothing that waits for the device."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels import sampling as kernels
from milepost.runner.sampling import SamplingRow, choose
from milepost.sampling_params import SamplingParams
from tests.kernels.nuclei import kept_by_sorting, random_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_nucleus_floor(share: float) -> None:
    scaled = random_logits(9, 151_936, "cuda")
    floor = torch.full((9, 1), -torch.inf, device="cuda")
    floor[3] = -2.0
    expected, wanted = kept_by_sorting(scaled, floor, share)
    none_known = torch.zeros((9, 1), dtype=torch.bool, device="cuda")
    found = kernels.nucleus_floor(scaled, floor, wanted, torch.zeros_like(floor), none_known)
    differing = ((scaled >= found) != expected).sum(-1)
    assert (differing <= 1).all()  # a token whose mass above is the share, but for rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_likeliest(num_rows: int, dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal: the first counts."""
    logits = random_logits(num_rows, 151_936, "cuda").to(dtype)
    assert torch.equal(kernels.likeliest(logits), logits.argmax(-1))


PARAMS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize("name", PARAMS)
def test_choices_are_those_of_a_cpu(name: str) -> None:
    logits = 3 * random_logits(2, 5000)
    rows = [_row(temperature, **PARAMS[name]) for temperature in (0, 1e-4)]
    choices = choose(logits.cuda(), rows), choose(logits, rows)
    for token, expected in zip(*(choice.read() for choice in choices), strict=True):
        assert token.token_id == expected.token_id
        assert token.rank == expected.rank


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", PARAMS)
def test_the_host_does_not_wait(name: str) -> None:
    logits, rows = random_logits(2, 5000, "cuda"), [_row(1, **PARAMS[name])] * 2
    choose(logits, rows)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        choose(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _row(temperature: float, **options: float) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(temperature=temperature, **options),
        tokens=[3, 4, 4, 7, 7, 9],
        num_prompt_tokens=3,
        seed=5,
    )
