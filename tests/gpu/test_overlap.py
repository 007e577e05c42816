"""Kernels that overlap with the one before them read what it wrote, also in a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from milepost.kernels import linear, moe, norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, SIZE, EXPERTS, LAYERS, REPLAYS = 2048, 512, 33, 6, 20


def fill(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 64, 256, 1024])
def test_a_chain_of_layers(num_tokens: int) -> None:
    """A graph of layers, each kernel short, gives the bits of kernels that run one by one."""
    weights = [(fill(8192, HIDDEN), fill(HIDDEN, 4096), fill(40, HIDDEN)) for _ in range(LAYERS)]
    gate_up, down = fill(EXPERTS, 2 * SIZE, HIDDEN), fill(EXPERTS, HIDDEN, SIZE)
    scale = torch.ones(HIDDEN, device="cuda")
    first = fill(num_tokens, HIDDEN)

    def run(pause: Callable[[], object]) -> list[Tensor]:
        hidden, delta, outputs = first, None, []
        for enter, leave, router in weights:
            hidden, normed = norm.add_norm(hidden, delta, scale, 1e-6)
            pause()
            wide = linear.multiply(normed, enter)
            pause()
            active = norm.silu_mul(wide)
            pause()
            mixed = linear.parts(active, leave)
            pause()
            hidden, normed = norm.add_norm(hidden, mixed, scale, 1e-6)
            pause()
            logits = linear.parts(normed, router)[..., :EXPERTS]
            pause()
            how = {"normalise": True, "has_shared": True, "dtype": normed.dtype}
            shares, experts = moe.route(logits, 8, **how)
            pause()
            delta = moe.parts(normed, shares, experts, gate_up, down)
            pause()
            outputs += [hidden, wide, active, mixed, normed, shares, experts, delta]
        return outputs

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(lambda: None)
    for _ in range(REPLAYS):
        first.copy_(fill(num_tokens, HIDDEN))
        for output in outputs:
            output.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for output, expected in zip(outputs, run(torch.cuda.synchronize), strict=True):
            assert torch.equal(output, expected)
