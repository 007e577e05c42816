"""Routed experts on a GPU at real shapes, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.kernels import products
from milepost.kernels.products import experts_reference
from tests.kernels.routed import apply, partials
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, SIZE, CHOSEN = 2048, 512, 8
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(num_tokens: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    random = torch.Generator("cuda").manual_seed(num_tokens)
    shapes = {
        (num_tokens, HIDDEN): 1.0,
        (num_tokens, num_experts + 1): 1.0,
        (num_experts + 1, 2 * SIZE, HIDDEN): HIDDEN**-0.5,
        (num_experts + 1, HIDDEN, SIZE): SIZE**-0.5,
    }
    return tuple(
        torch.randn(shape, generator=random, device="cuda", dtype=dtype) * scale
        for shape, scale in shapes.items()
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64, 80, 300, 700])
def test_apply(num_tokens: int, dtype: torch.dtype) -> None:
    hidden, logits, gate_up, down = make(num_tokens, 16, dtype)
    weights, experts = products.route(logits, CHOSEN, normalise=True, num_shared=1)
    output = apply(hidden, weights, experts, gate_up, down)
    wide = (tensor.double() for tensor in (hidden, weights))
    expected = experts_reference.apply(*wide, experts.long(), gate_up.double(), down.double())
    assert output.dtype == dtype
    assert relative_error(output, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_route_of_parts(num_tokens: int) -> None:
    """They are added up and rounded: nothing tells them from a product that is whole."""
    logits = make(num_tokens, 256, torch.bfloat16)[1]
    parts = torch.stack((logits.float() / 2, logits.float() / 4, logits.float() / 4), 1)
    how = {"normalise": True, "num_shared": 1}
    expected = products.route(logits, CHOSEN, **how)
    for output, wanted in zip(
        products.route(parts, CHOSEN, **how, dtype=logits.dtype), expected, strict=True
    ):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("num_tokens", [1, 64, 5000])
def test_route(num_tokens: int) -> None:
    logits = make(num_tokens, 256, torch.float32)[1]
    weights, experts = products.route(logits, CHOSEN, normalise=True, num_shared=1)
    expected = experts_reference.route(logits, CHOSEN, normalise=True, num_shared=1)
    torch.testing.assert_close(weights, expected[0])
    assert torch.equal(experts.long(), expected[1])


@pytest.mark.parametrize("num_tokens", [8, 32, 64])
def test_no_expert_is_read_for_padding(num_tokens: int) -> None:
    """Padding holds anything; the real tokens' outputs are what they are without it."""
    hidden, logits, gate_up, down = make(num_tokens, 256, torch.bfloat16)
    num_real = torch.tensor([num_tokens - 3], dtype=torch.int32, device="cuda")
    how = {"normalise": True, "num_shared": 1, "num_real": num_real}
    weights, experts = products.route(logits, CHOSEN, **how)
    assert torch.equal(experts[-3:], experts[-4].expand(3, -1))
    expected = partials(hidden, weights, experts, gate_up, down)[:-3]
    hidden[-3:], logits[-3:] = torch.nan, torch.nan
    routed = products.route(logits, CHOSEN, **how)
    assert torch.equal(routed[1], experts)
    assert torch.equal(partials(hidden, *routed, gate_up, down)[:-3], expected)


@pytest.mark.parametrize("num_tokens", [4, 8, 16, 64, 2048])
def test_same_bits_every_time_and_in_a_graph(num_tokens: int) -> None:
    """With choices that differ from those at capture."""
    hidden, logits, gate_up, down = make(num_tokens, 256, torch.bfloat16)

    def run() -> Tensor:
        weights, experts = products.route(logits, CHOSEN, normalise=True, num_shared=1)
        return partials(hidden, weights, experts, gate_up, down)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for values in (logits.flip(1), torch.zeros_like(logits), logits.roll(7, 0)):
        logits.copy_(values)
        output.fill_(torch.nan)
        graph.replay()
        expected = run()
        assert expected.isfinite().all()
        assert torch.equal(output, expected)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 3000])
def test_skewed_choices(num_tokens: int) -> None:
    """All tokens choose the same experts; the others' weights are not read."""
    hidden, logits, gate_up, down = make(num_tokens, 64, torch.bfloat16)
    logits[:, :CHOSEN] += 100
    gate_up[CHOSEN:-1] = down[CHOSEN:-1] = torch.nan
    weights, experts = products.route(logits, CHOSEN, normalise=True, num_shared=1)
    output = apply(hidden, weights, experts, gate_up, down)
    wide = (tensor.float() for tensor in (hidden, weights))
    expected = experts_reference.apply(*wide, experts.long(), gate_up.float(), down.float())
    assert relative_error(output, expected) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 16, 64, 300, 3000])
def test_experts_without_gates(num_tokens: int, dtype: torch.dtype) -> None:
    """Nemotron-3-Nano's sizes: inputs of 21 times 128, experts of 29 times 64, two shared ones."""
    random = torch.Generator("cuda").manual_seed(num_tokens)

    def draw(*shape: int) -> Tensor:
        wide = torch.randn(shape, generator=random, device="cuda")
        return (wide * shape[-1] ** -0.5).to(dtype)

    hidden, up, down = draw(num_tokens, 2688), draw(18, 1856, 2688), draw(18, 2688, 1856)
    logits = 8 * draw(num_tokens, 2, 16).float()
    bias = torch.linspace(-0.2, 0.2, 16, device="cuda")
    scores = products.Scores(kind="sigmoid", scale=2.5, gates_shared=False)
    how = {"normalise": True, "num_shared": 2, "scores": scores, "bias": bias, "dtype": dtype}
    weights, experts = products.route(logits, 6, **how)
    wanted = experts_reference.route(logits, 6, **how)
    assert torch.equal(experts.long(), wanted[1])
    torch.testing.assert_close(weights, wanted[0])
    output = apply(hidden, weights, experts, up, down)
    wide = hidden.double(), weights.double(), experts.long(), up.double(), down.double()
    assert relative_error(output, experts_reference.apply(*wide)) < TOLERANCES[dtype]
