"""Tiles of the experts' grouped GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from milepost.kernels.platform.tiles import Tiles
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.forms.quantised import FourBits, Fp8
from milepost.kernels.products.run_experts import RoutedRows
from milepost.kernels.products.tiles import MANY, choose_gemm


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRegime:
    """Tiles of both projections for an average of up to `max_routed` rows of an expert."""

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
_FLOAT32 = Tiles(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
"""Tensor cores do not multiply float32 exactly."""


def choose(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Chooses the tiles of both projections."""
    return _choose_raw(routed) if isinstance(routed.up, Raw) else _choose_quantised(routed)


def _choose_raw(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    up = down = _FLOAT32
    if routed.rows.dtype != torch.float32:
        regime = next(each for each in _REGIMES if routed.rows_each <= each.max_routed)
        up, down = regime.up, regime.down
    up = up.fitted(routed.chip, num_weights=2)
    if not routed.is_gated:
        # As many rows of weights in a tile as of gates and up projections together.
        up = replace(up, block_n=2 * up.block_n)
    return up, _dividing(down, routed.size).fitted(routed.chip)


def _dividing(tiles: Tiles, num_inputs: int) -> Tiles:
    """Returns steps half as deep, twice as many under way, if only these are whole."""
    half = tiles.block_k // 2
    if num_inputs % tiles.block_k == 0 or num_inputs % half:
        return tiles
    return replace(tiles, block_k=half, num_stages=2 * tiles.num_stages)


def _choose_quantised(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Chooses tiles whose left operand is the weight."""
    wide = choose_gemm(routed.rows_each, is_fp8=isinstance(routed.up, Fp8)).fitted(routed.chip)
    wide = replace(wide, is_swapped=True)
    # Gate and up projection have a sum each: with wide tiles more than there are registers.
    narrow = replace(wide, block_n=64, num_warps=8 if wide.block_m == MANY.block_m else 4)
    is_narrow = isinstance(routed.down, FourBits) and wide.block_m < MANY.block_m
    return narrow, narrow if is_narrow else wide
