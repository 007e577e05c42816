"""Routed experts on a GPU: `reference`'s functions, in three regimes by the number of tokens.

Very few tokens: each choice reads its expert by itself. More: choices are grouped by expert, so
that every expert's weights are read once, in blocks as tall as experts have rows. Launches depend
on shapes alone, never on what was chosen.

Legend: T tokens, X experts, N choices of a token, P = T * N, H hidden size, I an expert's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.moe import products, vectors
from milepost.kernels.moe.products import Tiles
from milepost.kernels.moe.routing import group, route

__all__ = ["parts", "route"]

_VECTOR_CHOICES = 72
"""Up to this many choices (eight tokens of nine) nothing is grouped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """How the products run for up to `choices` choices an expert on average."""

    choices: float
    rows: int
    expand: Tiles
    contract: Tiles


_REGIMES = (
    Regime(
        choices=8,
        rows=16,
        expand=Tiles(columns=64, depth=128, warps=4, stages=3, is_swapped=True),
        contract=Tiles(columns=128, depth=128, warps=4, stages=3, is_swapped=True),
    ),
    Regime(
        choices=32,
        rows=32,
        expand=Tiles(columns=64, depth=64, warps=4, stages=5, is_swapped=True),
        contract=Tiles(columns=128, depth=64, warps=4, stages=4),
    ),
    Regime(
        choices=128,
        rows=64,
        expand=Tiles(columns=128, depth=64, warps=4, stages=4),
        contract=Tiles(columns=256, depth=64, warps=8, stages=4),
    ),
    Regime(
        choices=float("inf"),
        rows=128,
        expand=Tiles(columns=128, depth=64, warps=8, stages=4),
        contract=Tiles(columns=256, depth=64, warps=8, stages=3),
    ),
)

_WIDE = Regime(
    choices=float("inf"),
    rows=16,
    expand=Tiles(columns=32, depth=32, warps=4, stages=2),
    contract=Tiles(columns=32, depth=32, warps=4, stages=2),
)
"""For float32, which the tensor cores do not multiply exactly."""


def parts(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """A part for each choice: [T, N, H], in `hidden`'s type.

    `hidden` [T, H] with contiguous rows, `weights` and `experts` (int32) [T, N] as `route` returns
    them, `gate_up` [X, 2 * I, H] and `down` [X, H, I] contiguous.
    """
    num_tokens, num_chosen = experts.shape
    num_choices = experts.numel()
    active = hidden.new_empty(num_choices, down.shape[2])
    output = hidden.new_empty(num_tokens, num_chosen, down.shape[1])
    if num_choices <= _VECTOR_CHOICES:
        vectors.expand(hidden, experts, gate_up, active, columns=4, depth=2048, warps=4)
        vectors.contract(active, weights, experts, down, output, columns=8, depth=512, warps=4)
        return output
    run_grouped(hidden, weights, experts, gate_up, down, active, output)
    return output


def run_grouped(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    active: Tensor,
    output: Tensor,
    regime: Regime | None = None,
) -> None:
    """Group the choices and run both products, into `active` [P, I] and `output` [T, N, H]."""
    num_experts = gate_up.shape[0]
    regime = regime or _choose_regime(hidden.dtype, experts.numel() / num_experts)
    groups = group(experts, num_experts, regime.rows)
    products.expand(hidden, gate_up, active, groups, regime.rows, regime.expand)
    products.contract(active, weights, down, output, groups, regime.rows, regime.contract)


def _choose_regime(dtype: torch.dtype, choices: float) -> Regime:
    if dtype == torch.float32:
        return _WIDE
    return next(regime for regime in _REGIMES if choices <= regime.choices)
