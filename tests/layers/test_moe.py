"""The mixture of experts: a shared expert among the others, or beside them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from milepost.kernels import products
from milepost.kernels.products import SOFTMAX, Scores
from milepost.layers.experts import ExpertNames
from milepost.layers.moe import ExpertShapes, MoE
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import Holder, merge
from tests.numbers import relative_error

HIDDEN, SIZE, EXPERTS = 12, 6, 5
KIND = ModuleScope(dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize("scores", [Scores(), Scores(kind="sigmoid", gates_shared=False)], ids=str)
@pytest.mark.parametrize("shared_size", [0, SIZE, 3 * SIZE, 9])
def test_shared_expert(shared_size: int, scores: Scores) -> None:
    """Stored through the placements, so that every row must lie where it is read."""
    shapes = ExpertShapes(
        num_experts=EXPERTS,
        num_chosen=2,
        size=SIZE,
        shared_size=shared_size,
        normalise=True,
        scores=scores,
        has_bias=scores != SOFTMAX,
    )
    names = ExpertNames(bias="expert_bias", projections=("w1_proj", "w3_proj", "w2_proj"))
    layer = MoE(HIDDEN, shapes, KIND.under("mlp"), names)
    random = torch.Generator().manual_seed(0)
    weights = {}
    holders = (module for module in layer.modules() if isinstance(module, Holder))
    for name, place in merge(holder.placements() for holder in holders).items():
        weights[name] = torch.randn(place.shape, generator=random, dtype=torch.float64)
        place.store(weights[name])
    has_gate = shared_size > 0 and scores.gates_shared
    assert ("mlp.shared_expert_gate.weight" in weights) == has_gate
    bias = weights.get("mlp.expert_bias")
    assert (bias is None) == (scores == SOFTMAX)

    def run(name: str, hidden: torch.Tensor) -> torch.Tensor:
        letters = ("w1", "w3", "w2") if ".experts." in name else ("gate", "up", "down")
        gate, up, down = (weights[f"{name}.{letter}_proj.weight"] for letter in letters)
        return F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)

    hidden = torch.randn(7, HIDDEN, generator=random, dtype=torch.float64)
    logits = F.linear(hidden, weights["mlp.gate.weight"])
    shares, experts = products.route(logits, 2, normalise=True, scores=scores, bias=bias)
    expected = torch.zeros_like(hidden)
    for token, choice in product(range(7), range(2)):
        name = f"mlp.experts.{experts[token, choice]}"
        expected[token] += shares[token, choice] * run(name, hidden[token])
    if shared_size:
        gate = 1
        if has_gate:
            gate = F.linear(hidden, weights["mlp.shared_expert_gate.weight"]).sigmoid()
        expected += gate * run("mlp.shared_expert", hidden)
    assert relative_error(layer.partials(hidden).sum(1), expected) < 1e-14
