"""Products that the norm ahead makes on the way, with torch in place of the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from milepost.kernels import norm, products
from milepost.kernels.layout.emit import Activations, Emit, Projected, values_of
from milepost.kernels.platform.tables import SumOrder
from milepost.layers.linear import Linear, Sections
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import ResidualBlock
from milepost.layers.weights import RAW, RawPrecision, RawWeight

KIND = ModuleScope(
    dtype=torch.float32,
    device=torch.device("cpu"),
    precision_of=lambda path: Other() if path.startswith("other") else RAW,
)


@dataclass(frozen=True)
class Other(RawPrecision):
    """Raw, and yet of another precision."""


class Projecting(nn.Module):
    """A part that is one projection."""

    spec = operation = rotary = None
    reads = Emit.VALUES

    def __init__(self, sections: Sections, *, bias: bool = False) -> None:
        super().__init__()
        self.first = Linear(6, sections, KIND, bias=bias)
        self.first.fill(1.0, torch.Generator().manual_seed(0))

    def run(self, hidden: Tensor, ctx: object, number: int) -> Tensor:  # noqa: ARG002
        return self.first(hidden)


def run(part: Projecting, num_tokens: int) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(num_tokens, 6, generator=torch.Generator().manual_seed(1))
    block = ResidualBlock(part, pre=RMSNorm(6, 1e-6, replace(KIND)))
    block.pre.fill(1.0, torch.Generator())
    return block.run(hidden, 2 * hidden, SimpleNamespace(order=SumOrder.FREE), (0,), ends=False)


@pytest.mark.parametrize(
    ("sections", "bias", "num_tokens", "made"),
    [
        ([("a", 5)], False, 1, 5),
        ([("other", 4), ("a", 2), ("b", 3)], False, 1, 5),
        ([("a", 2), ("other", 4)], False, 1, 4),
        ([("a", 2), ("other", 4), ("b", 1), ("other2", 1)], False, 1, 0),
        ([("other", 4), ("a", 2)], True, 1, 0),
        ([("other", 4), ("a", 2)], False, 2, 0),
    ],
    ids=["one", "last", "first", "apart", "bias", "rows"],
)
def test_a_block_has_its_norm_multiply(
    monkeypatch, sections: Sections, bias: bool, num_tokens: int, made: int
) -> None:
    """The last matrix of one row is multiplied with the norm, and not once more."""
    part = Projecting(sections, bias=bias)
    expected = run(part, num_tokens)
    found = []

    def both(
        hidden: Tensor,
        delta: Tensor | None,
        scale: Tensor,
        eps: float,
        multiplier: float,
        weight: Tensor,
        output: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total, normed = norm.add_norm(hidden, delta, scale, eps, multiplier)
        output.copy_(normed @ weight.t())
        found.append(len(weight))
        # What is multiplied again is nothing.
        weight.fill_(torch.nan)
        return total, normed

    monkeypatch.setattr(products, "norms_too", lambda *_: True)
    monkeypatch.setattr(norm, "add_norm_and_multiply", both)
    for tensor, wanted in zip(run(part, num_tokens), expected, strict=True):
        torch.testing.assert_close(tensor, wanted)
    assert found == ([made] if made else [])
    assert isinstance(part.first.weights[0], RawWeight)


def test_a_product_is_read_by_its_own_projection_alone() -> None:
    """Others that read the same row multiply it, and a copy of the row has no product."""
    first, other = Projecting([("a", 5)]).first, Projecting([("b", 5)]).first
    row, output = torch.randn(1, 6), torch.full((1, 5), 7.0)
    rows = Activations(values=row, projected=Projected(owner=first, output=output))
    assert first(rows) is output
    assert torch.equal(other(rows), other(row))
    assert torch.equal(first(values_of(rows).clone()), first(row))
