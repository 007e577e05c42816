"""Norms against transformers', and where sums are kept."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from milepost.kernels.recurrent import DeltaWeights, MixerSizes, RecurrentRule
from milepost.kernels.recurrent.reference import gated_norm
from milepost.layers.norm import HeadNorms, RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.parallel import Cut
from tests.numbers import relative_error

SIZE, EPS = 24, 1e-6


def kind(dtype: torch.dtype) -> ModuleScope:
    return ModuleScope(dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
def test_norms_match_transformers(dtype: torch.dtype, tolerance: float) -> None:
    hidden, gate, weight = torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(0))
    hidden, gate, weight = hidden.to(dtype), gate.to(dtype), weight[0].to(dtype)
    norm, norm_expected = RMSNorm(SIZE, EPS, kind(dtype), offset=1.0), Qwen3NextRMSNorm(SIZE, EPS)
    gated_expected = Qwen3NextRMSNormGated(SIZE, EPS)
    norm.placements()["weight"].store(weight)
    for expected in (norm_expected, gated_expected):
        expected.weight.data.copy_(weight)
    nothing = torch.empty(0)
    sizes = MixerSizes(rule=RecurrentRule.GATED_DELTA, units=1, group=1, shared=1, own=SIZE, taps=1)
    weights = DeltaWeights(
        conv=nothing,
        decay_rate=nothing,
        decay_bias=nothing,
        norm=weight.to(torch.float32),
        norm_eps=EPS,
    )
    plain, gated = norm(hidden), gated_norm(sizes, hidden[:, None], gate, weights)[:, 0]
    assert plain.dtype == gated.dtype == dtype
    with torch.no_grad():
        assert relative_error(plain, norm_expected(hidden)) < tolerance
        assert relative_error(gated, gated_expected(hidden, gate)) < tolerance


def test_a_bfloat16_scale_near_one_keeps_its_weight() -> None:
    """1 + w is no bfloat16 number for small w, so the scale must be kept wider."""
    norm = RMSNorm(SIZE, EPS, kind(torch.bfloat16), offset=1.0)
    weight = torch.full((SIZE,), 1e-3, dtype=torch.bfloat16)
    norm.placements()["weight"].store(weight)
    assert torch.equal(norm.scale, weight.float() + 1)


@pytest.mark.parametrize("is_whole", [False, True])
def test_groups_of_heads_have_their_own_scale(is_whole: bool) -> None:
    groups = {"q_norm": Cut.all_of(2), "k_norm": Cut.all_of(1)}
    norms = HeadNorms(groups, SIZE, kind(torch.float64), offset=1.0, is_whole=is_whole)
    for name, weight in (("q_norm.weight", 1.0), ("k_norm.weight", 4.0)):
        placement = norms.placements()[name]
        heads = 2 if is_whole and name == "q_norm.weight" else 1
        assert placement.shape == (heads * SIZE,)
        placement.store(torch.full(placement.shape, weight))
    assert torch.equal(norms.scale[:, 0], torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64))


def test_float64_sums_are_float64() -> None:
    norm = RMSNorm(SIZE, 0.0, kind(torch.float64))
    norm.fill(1.0, torch.Generator())
    hidden = torch.randn(4, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    assert relative_error(norm(hidden), expected) < 1e-15


@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_a_sum_of_partials_is_normed_as_it_would_be_whole(num_parts: int) -> None:
    norm = RMSNorm(SIZE, EPS, kind(torch.bfloat16))
    norm.placements()["weight"].store(torch.linspace(0.5, 2, SIZE))
    output = torch.randn(5, *[num_parts] * (num_parts > 0), SIZE)
    before = output.clone()
    found = norm.norm_sum(output)
    whole = output.sum(1) if num_parts else output
    assert torch.allclose(found, norm(whole), atol=1e-6)
    assert found.dtype == output.dtype, "what follows adds it in float32"
    assert torch.equal(output, before)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_an_output_is_normed_by_whoever_adds_it(num_parts: int) -> None:
    own = RMSNorm(SIZE, EPS, kind(torch.float32))
    own.placements()["weight"].store(torch.linspace(0.5, 2, SIZE))
    joined, plain = (
        RMSNorm(SIZE, EPS, kind(torch.float32), of_output=each) for each in (own, None)
    )
    for each in (joined, plain):
        each.fill(1.0, torch.Generator())
    hidden, output = torch.randn(5, SIZE), torch.randn(5, *[num_parts] * (num_parts > 0), SIZE)
    found, expected = joined.add(hidden, output), plain.add(hidden, own.norm_sum(output))
    torch.testing.assert_close(found, expected)
    assert torch.equal(joined.add(hidden, None)[1], plain(hidden)), "an embedding has none"
