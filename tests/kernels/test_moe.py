"""Routed experts against one token and one expert at a time, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milepost.kernels import products
from milepost.kernels.products import Scores, experts_reference
from tests.kernels.routed import apply
from tests.numbers import relative_error

HIDDEN, SIZE = 12, 5


def make(num_tokens: int, num_experts: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(num_tokens)
    shapes = (
        (num_tokens, HIDDEN),
        (num_tokens, num_experts),
        (num_experts, 2 * SIZE, HIDDEN),
        (num_experts, HIDDEN, SIZE),
    )
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(1, 4, 1), (1, 8, 2), (7, 3, 3), (7, 8, 2), (33, 8, 2), (40, 60, 1)],
)
def test_apply_matches_token_by_token(num_tokens: int, num_experts: int, num_chosen: int) -> None:
    hidden, logits, gate_up, down = make(num_tokens, num_experts)
    weights, experts = products.route(logits, num_chosen, normalise=True)
    output = apply(hidden, weights, experts, gate_up, down)
    for token in range(num_tokens):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            expected += weight * (down[expert] @ (F.silu(gate) * up))
        assert relative_error(output[token], expected) < 1e-14


@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_both_ways_agree(limit: float) -> None:
    hidden, logits, gate_up, down = make(9, 5)
    arguments = hidden, *products.route(logits, 2, normalise=False), gate_up, down, limit
    every, hit = experts_reference._apply_all(*arguments), experts_reference._apply_hit(*arguments)
    assert relative_error(every, hit) < 1e-14


def test_experts_that_no_token_chose_are_not_read() -> None:
    hidden, logits, gate_up, down = make(40, 6)
    logits[:, 2] = -torch.inf
    gate_up[2] = torch.nan
    output = apply(hidden, *products.route(logits, 2, normalise=True), gate_up, down)
    assert output.isfinite().all()


def test_route_weights() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    weights, experts = products.route(logits, 2, normalise=False)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 3]])
    weights, _ = products.route(logits, 2, normalise=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1))


def test_sigmoid_scores_choose_among_the_best_groups() -> None:
    """Experts (0 1 2) (3 4 5) (6 7 8): the best expert stands in a group that isn't among the best
    two; the bias chooses, and is no part of the weights."""
    scores = torch.tensor([[0.9, 0.01, 0.02, 0.6, 0.7, 0.1, 0.3, 0.5, 0.45]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0.1, 0, 0, 0.25], dtype=torch.float64)
    how = Scores(kind="sigmoid", num_groups=3, num_groups_chosen=2, norm_eps=0.2, scale=3.0)
    given = {"scores": how, "bias": bias, "normalise": True}
    weights, experts = products.route(scores.logit(), 3, **given)
    assert experts.tolist() == [[4, 8, 3]]
    expected = torch.tensor([[0.7, 0.45, 0.6]], dtype=torch.float64)
    torch.testing.assert_close(weights, 3 * expected / (1.75 + 0.2))


def test_shared_expert_without_a_gate_has_no_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    how = Scores(kind="sigmoid", gates_shared=False, scale=2.0)
    weights, experts = products.route(logits, 1, normalise=False, num_shared=1, scores=how)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[2 * torch.tensor(3.0).sigmoid(), 1.0]]))


def test_sigmoid_scores_are_taken_from_unrounded_logits() -> None:
    """In bfloat16 the two are equal."""
    logits = torch.tensor([[1.0, 1.001]])
    given = {"normalise": False, "dtype": torch.bfloat16}
    assert products.route(logits, 1, **given, scores=Scores(kind="sigmoid"))[1].item() == 1
    assert products.route(logits, 1, **given)[1].item() == 0


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_experts_without_gates_square_a_relu(num_tokens: int) -> None:
    hidden, logits, gate_up, down = make(num_tokens, 4)
    up = gate_up[:, :SIZE]
    weights, experts = products.route(logits, 2, normalise=True)
    output = apply(hidden, weights, experts, up, down)
    units = torch.einsum("xih,th->txi", up, hidden).relu() ** 2
    every = torch.einsum("xhi,txi->txh", down, units)
    shares = torch.zeros(num_tokens, 4, dtype=torch.float64).scatter_(1, experts, weights)
    assert relative_error(output, torch.einsum("tx,txh->th", shares, every)) < 1e-14
