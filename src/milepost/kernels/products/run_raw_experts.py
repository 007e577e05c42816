"""Routed experts on a GPU: `reference`'s functions, in three regimes by the number of tokens.

Very few tokens: each routed token reads its expert by itself (`gemv`). More: routed tokens are
grouped by expert (`grouped_gemm`). Many: blocks so tall that the arithmetic is what costs (`tall`).
Launches depend on shapes alone, never on what was chosen.

Legend: T tokens, X experts, N experts of a token, P = T * N routed tokens, H hidden size, I an
expert's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.platform.tiles import Tiles
from milepost.kernels.products.expert_table import EXPERTS, Mixture
from milepost.kernels.products.forms.matrix import Matrix, Raw
from milepost.kernels.products.grouping import MANY_ROUTED, group_few, group_many
from milepost.kernels.products.portable import (
    raw_gemv_experts,
    raw_grouped,
    raw_grouped_large,
)
from milepost.kernels.products.portable.activation import is_gated
from milepost.kernels.products.routing import route

__all__ = ["partials", "route"]

_SMALL = 1024
"""Up to so many units an expert's outputs are found eight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRegime:
    """How the GEMMs run for up to `max_routed` tokens an expert on average."""

    max_routed: float
    up: Tiles
    down: Tiles


_REGIMES = (
    ExpertRegime(
        max_routed=10,
        up=Tiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3, is_swapped=True),
        down=Tiles(
            block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3, is_swapped=True
        ),
    ),
    ExpertRegime(
        max_routed=32,
        up=Tiles(block_m=32, block_n=64, block_k=64, num_warps=4, num_stages=5, is_swapped=True),
        down=Tiles(block_m=32, block_n=128, block_k=64, num_warps=4, num_stages=4),
    ),
    ExpertRegime(
        max_routed=float("inf"),
        up=Tiles(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4),
        down=Tiles(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4),
    ),
)

_WIDE = ExpertRegime(
    max_routed=float("inf"),
    up=Tiles(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2),
    down=Tiles(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2),
)
"""For float32, which the tensor cores do not multiply exactly."""


def partials(hidden: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A partial for each routed token: [T, N, H], in `hidden`'s type.

    `hidden` [T, H] with contiguous rows, `weights` and `experts` (int32) [T, N] as `route` returns
    them, `up` [X, 2 * I, H], or [X, I, H] of experts without gates, and `down` [X, H, I]
    contiguous.
    """
    check_rows(hidden=hidden)
    check_contiguous(weights=weights, experts=experts, up=up, down=down)
    num_tokens, top_k = experts.shape
    num_routed = experts.numel()
    output = hidden.new_empty(num_tokens, top_k, down.shape[1])
    active = hidden.new_empty(num_routed, down.shape[2])
    num_experts, chip = up.shape[0], probe(hidden.device)
    mixture = Mixture(
        up=Matrix.of(Raw(values=up)),
        down=Matrix.of(Raw(values=down)),
        num_experts=num_experts,
        num_tokens=num_tokens,
        num_chosen=top_k,
        has_16_bits=hidden.element_size() == 2,
    )
    choice = EXPERTS.choose(mixture, chip)
    assert choice is not None, "the last row of a form serves all"
    kernel = choice.kernel
    if kernel.module == "products.portable.raw_gemv_experts":
        block_k = 2048 if hidden.shape[1] <= 2048 else 1024
        raw_gemv_experts.project_up(
            hidden, experts, up, active, block_n=4, block_k=block_k, num_warps=4
        )
        block_n, block_k = (8, 512) if down.shape[2] <= _SMALL else (2, 2048)
        how = {"block_n": block_n, "block_k": block_k, "num_warps": 4}
        raw_gemv_experts.project_down(active, weights, experts, down, output, **how)
        return output
    if kernel.module == "products.portable.raw_grouped_large":
        groups = group_many(experts, num_experts, raw_grouped_large.BLOCK_M)
        raw_grouped_large.project_up(hidden, up, active, groups)
        raw_grouped_large.project_down(active, weights, down, output, groups)
        return output
    regime = _choose_regime(hidden.dtype, num_routed / num_experts)
    group = group_many if num_routed > MANY_ROUTED else group_few
    groups = group(experts, num_experts, regime.up.block_m)
    up_tiles = regime.up.fitted(chip, num_weights=2)
    if not is_gated(up, down.shape[2]):
        # As many rows of weights in a tile as of gates and up projections together.
        up_tiles = replace(up_tiles, block_n=2 * up_tiles.block_n)
    down_tiles = _dividing(regime.down, down.shape[2]).fitted(chip)
    raw_grouped.project_up(hidden, up, active, groups, up_tiles)
    raw_grouped.project_down(active, weights, down, output, groups, down_tiles)
    return output


def _dividing(tiles: Tiles, num_inputs: int) -> Tiles:
    """The same in steps half as deep, twice as many under way, where only these are whole."""
    half = tiles.block_k // 2
    if num_inputs % tiles.block_k == 0 or num_inputs % half:
        return tiles
    return replace(tiles, block_k=half, num_stages=2 * tiles.num_stages)


def _choose_regime(dtype: torch.dtype, num_routed: float) -> ExpertRegime:
    if dtype == torch.float32:
        return _WIDE
    return next(regime for regime in _REGIMES if num_routed <= regime.max_routed)
