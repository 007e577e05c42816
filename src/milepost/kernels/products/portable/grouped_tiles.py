"""Tiles of the experts' grouped GEMMs."""

from __future__ import annotations

from dataclasses import replace

import torch

from milepost.kernels.platform.tiles import Tiles
from milepost.kernels.products.expert_table import SEARCHED
from milepost.kernels.products.forms.matrix import Matrix, Raw
from milepost.kernels.products.forms.quantised import FourBits, Int8
from milepost.kernels.products.gemm_tiles import MANY, choose_experts, choose_gemm
from milepost.kernels.products.run_experts import RoutedRows


def _tiles(block_m: int, block_n: int, block_k: int, num_stages: int, *, is_swapped: bool) -> Tiles:
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=4,
        num_stages=num_stages,
        is_swapped=is_swapped,
    )


_LARGE = _tiles(64, 128, 64, 4, is_swapped=False)
_REGIMES = (
    (10, _tiles(16, 64, 128, 3, is_swapped=True), _tiles(16, 128, 128, 3, is_swapped=True)),
    (32, _tiles(32, 64, 64, 5, is_swapped=True), _tiles(32, 128, 64, 4, is_swapped=False)),
    (float("inf"), _LARGE, _LARGE),
)
"""Tiles of both projections, by the most rows of an expert, on average, that they are for."""
_SEARCHED = replace(_REGIMES[0][1], block_k=64, num_stages=5), _REGIMES[0][2]
"""Tiles of both projections of tokens that are not grouped."""
_NARROWEST = 32
"""Outputs of a tile, at least, if its order must be that of larger ones."""
_FLOAT32 = Tiles(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
"""Tensor cores do not multiply float32 exactly."""


def choose(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Chooses the tiles of both projections."""
    return _choose_raw(routed) if isinstance(routed.up, Raw) else _choose_quantised(routed)


def _choose_raw(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    up = down = _FLOAT32
    if routed.rows.dtype != torch.float32:
        if routed.up.batch_invariant:
            # Only the largest tiles have the order of blocks that are larger still.
            up = _spread(_LARGE, routed.size, routed)
            down = _spread(_LARGE, routed.down.num_outputs, routed)
        elif len(routed.experts) <= SEARCHED:
            up, down = _SEARCHED
        else:
            _, up, down = next(each for each in _REGIMES if routed.rows_each <= each[0])
    up = up.fitted(routed.chip, num_weights=2)
    if not routed.is_gated:
        # As many rows of weights in a tile as of gates and up projections together.
        up = replace(up, block_n=2 * up.block_n)
    return up, _dividing(down, routed.size).fitted(routed.chip)


def _spread(tiles: Tiles, num_outputs: int, routed: RoutedRows) -> Tiles:
    """Returns narrower tiles of the same order for tokens so few that SMs would be left over."""
    block_n, num_hit = tiles.block_n, min(routed.num_routed, routed.num_experts)
    while block_n > _NARROWEST and num_hit * num_outputs < routed.chip.num_sms * block_n:
        block_n //= 2
    return replace(tiles, block_n=block_n)


def _dividing(tiles: Tiles, num_inputs: int) -> Tiles:
    """Returns steps half as deep, twice as many under way, if only these are whole."""
    half = tiles.block_k // 2
    if num_inputs % tiles.block_k == 0 or num_inputs % half:
        return tiles
    return replace(tiles, block_k=half, num_stages=2 * tiles.num_stages)


def _choose_quantised(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Chooses tiles whose left operand is the weight."""
    chip, down = routed.chip, Matrix.of(routed.down)
    if isinstance(routed.down, FourBits):
        up_tiles, down_tiles = choose_experts(routed.rows_each, down, chip)
        return up_tiles.fitted(chip, num_weights=1 + routed.is_gated), down_tiles.fitted(chip)
    wide = choose_gemm(routed.rows_each, down, chip)
    wide = wide.fitted(chip, num_bytes=1 if isinstance(routed.down, Int8) else 2)
    wide = replace(wide, is_swapped=True)
    # Gate and up projection have a sum each: with wide tiles more than there are registers.
    return replace(wide, block_n=64, num_warps=8 if wide.block_m == MANY.block_m else 4), wide
