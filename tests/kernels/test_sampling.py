"""The definition of a draw: known numbers, and what remains by sorting."""

from __future__ import annotations

import math

import pytest
import torch

from milepost.kernels import sampling
from tests.kernels.nuclei import random_logits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox(counter: list[int], key: list[int], words: list[int]) -> None:
    """The numbers that its authors publish."""
    found = sampling.philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert [int(word) for word in found] == words


def test_noise_is_a_function_of_seed_index_and_token() -> None:
    seeds, indices = [5, 2**64 - 1, 5], [0, 2**32 - 1, 1]
    noise = sampling.gumbel(seeds, indices, 1003, CPU)
    assert noise.dtype == torch.float32
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        assert torch.equal(sampling.gumbel([seed], [index], 1003, CPU)[0], noise[row])
        assert torch.equal(sampling.gumbel([seed], [index], 7, CPU)[0], noise[row, :7])
    assert not (noise[0] == noise[2]).any()


def test_noise_is_gumbels() -> None:
    """Mean, variance and the tail that decides draws."""
    noise = sampling.gumbel([1], [2], 2_000_000, CPU)
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    for height in (2, 5, 8):
        share = (noise > height).double().mean().item()
        assert share == pytest.approx(-math.expm1(-math.exp(-height)), rel=0.05)


def kept_one_by_one(scaled: torch.Tensor, min_p: float, top_k: int, top_p: float) -> set[int]:
    """Token ids that remain, from the likeliest on; equal ones stay or go together."""
    weights = [math.exp(x) for x in scaled.tolist()]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    left = [token for token in order if weights[token] >= min_p][: top_k or None]
    wanted, above, lowest = top_p * sum(weights[t] for t in left), 0.0, weights[left[0]]
    for token in left:
        if above >= wanted:
            break
        lowest = weights[token]
        above += weights[token]
    return {token for token, weight in enumerate(weights) if weight >= lowest and weight > 0}


SETTINGS = [
    (0.0, 0, 0.9),
    (0.05, 0, 1.0),
    (0.2, 0, 0.97),
    (0.0, 7, 1.0),
    (0.0, 30, 0.7),
    (0.3, 30, 0.999),
    (0.02, 200, 0.95),
    (0.0, 1, 0.5),
    (0.0, 0, 1e-9),
]


@pytest.mark.parametrize("num_candidates", [4, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_remains(dtype: torch.dtype, num_candidates: int, monkeypatch) -> None:
    """A share of what min_p and top_k leave, not of all: without that min_p 0.2 would go on to
    tokens that it leaves out."""
    monkeypatch.setattr(sampling, "_CANDIDATES", num_candidates)
    scaled = random_logits(1, 300).to(dtype).expand(len(SETTINGS), -1)
    min_p, top_k, top_p = (torch.tensor(column)[:, None] for column in zip(*SETTINGS, strict=True))
    lowest = sampling.lowest_kept(
        scaled,
        floor=min_p.to(dtype).log(),
        top_k=torch.where(top_k > 0, top_k, 300),
        top_p=top_p.double(),
    )
    for row, setting in enumerate(SETTINGS):
        kept = set(torch.nonzero(scaled[row] >= lowest[row]).flatten().tolist())
        expected = kept_one_by_one(scaled[row], *setting)
        assert {token for token in kept if scaled[row, token] > -math.inf} == expected, setting


def test_tokens_that_min_p_leaves_out_count_for_nothing() -> None:
    """Half of the mass lies below the floor, in many tokens; of the rest the first has 0.6."""
    weights = torch.tensor([[1.0, 2 / 3, *[0.01] * 167]])
    lowest = sampling.lowest_kept(
        weights.log(),
        floor=torch.tensor([[math.log(0.5)]]),
        top_k=torch.tensor([[169]]),
        top_p=torch.tensor([[0.55]], dtype=torch.float64),
    )
    assert lowest.item() == 0
