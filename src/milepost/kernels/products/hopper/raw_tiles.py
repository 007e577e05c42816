"""Which GEMMs of few rows Hopper's kernel takes, and how it cuts them up.

The weight is spread evenly: a tile is as wide as leaves each SM one. Tensor cores take 64 or 128
rows of a weight, so what they make of the rows behind a tile's last is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from milepost.kernels.platform.tiles import cdiv

BLOCK_K = 64
"""Inputs of a step: 128 bytes, the widest rows that TMA swizzles."""
_NARROWEST = 8
"""Outputs that a tile can be made wider by: rows of TMA's swizzle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperTiles:
    """How a GEMM is cut up where tensor cores take the weight as the left operand."""

    block_m: int
    """Tokens; what others in a tile come to is dropped."""
    block_n: int
    """Outputs of a tile: a multiple of 8."""
    num_stages: int
    """Steps that are under way at a time."""
    max_warps: int
    """That multiply."""
    programs: int = 1
    """That share an SM."""
    split_k: int = 1

    @property
    def mma_m(self) -> int:
        """Rows of weight that are multiplied at a time, the tile's first."""
        return 64 if self.block_n <= 64 else 128

    @property
    def num_warps(self) -> int:
        """Each has 16 rows of weight or more."""
        return min(self.max_warps, self.mma_m // 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRegime:
    """Tiles for up to so many rows."""

    wide: HopperTiles
    """Many outputs. A tile is at most so wide."""
    long: HopperTiles
    """Many inputs, few outputs."""
    square: HopperTiles
    """Some outputs, and as many inputs."""
    small: HopperTiles | None
    """Few outputs, some inputs; None where `triton`'s tiles or torch's GEMM are as fast."""


_REGIMES = (
    LinearRegime(
        wide=HopperTiles(block_m=16, block_n=128, num_stages=12, max_warps=4),
        long=HopperTiles(block_m=16, block_n=64, num_stages=10, max_warps=4, programs=2, split_k=4),
        square=HopperTiles(block_m=16, block_n=64, num_stages=8, max_warps=4, split_k=2),
        small=None,
    ),
    LinearRegime(
        wide=HopperTiles(block_m=32, block_n=128, num_stages=11, max_warps=8),
        long=HopperTiles(block_m=32, block_n=64, num_stages=8, max_warps=4, programs=2, split_k=4),
        square=HopperTiles(block_m=32, block_n=64, num_stages=6, max_warps=4, split_k=2),
        small=HopperTiles(block_m=32, block_n=64, num_stages=10, max_warps=4, split_k=4),
    ),
    LinearRegime(
        wide=HopperTiles(block_m=64, block_n=128, num_stages=9, max_warps=8),
        long=HopperTiles(block_m=64, block_n=64, num_stages=12, max_warps=4, split_k=2),
        square=HopperTiles(block_m=64, block_n=64, num_stages=12, max_warps=4, split_k=2),
        small=HopperTiles(block_m=64, block_n=64, num_stages=10, max_warps=4, split_k=4),
    ),
)
_FEW, _SOME, _MANY = range(1 << 11, 1 << 12), range(1 << 12, 1 << 13), range(1 << 13, 1 << 15)
"""Outputs, or inputs, of GEMMs that gain. With more outputs it does not matter when they begin;
with fewer of both, `triton`'s tiles are as fast."""


def find_tiles(
    num_tokens: int, shape: tuple[int, int], num_sms: int, *, is_whole: bool = False
) -> HopperTiles | None:
    """Tiles of a GEMM with a weight of this shape, [O, I], if this kernel is the faster one. Where
    the result `is_whole` nobody adds up split-K partials on the way.
    """
    num_outputs, num_inputs = shape
    regime = next((each for each in _REGIMES if 1 < num_tokens <= each.wide.block_m), None)
    if regime is None:
        return None
    tiles: HopperTiles | None = None
    is_wide = is_whole and num_outputs in _SOME and num_inputs not in _MANY
    if num_outputs in _MANY or is_wide:
        tiles = _spread(regime.wide, num_outputs, num_sms)
    elif num_inputs in _MANY and (num_outputs in _FEW or num_outputs in _SOME):
        tiles = regime.long
    elif num_inputs in _SOME and num_outputs in _SOME:
        tiles = regime.square
    elif num_inputs in _SOME and num_outputs in _FEW:
        tiles = regime.small
    elif num_inputs in _FEW and (num_outputs in _FEW or num_outputs in _SOME) and not is_whole:
        tiles = regime.long
    if tiles is None or num_inputs % (BLOCK_K * tiles.split_k) != 0:
        return None
    return tiles


def _spread(widest: HopperTiles, num_outputs: int, num_sms: int) -> HopperTiles:
    """The same with tiles just so wide that all SMs get as many."""
    rounds = cdiv(num_outputs, num_sms * widest.block_n)
    block_n = cdiv(num_outputs, num_sms * rounds)
    return replace(widest, block_n=cdiv(block_n, _NARROWEST) * _NARROWEST)
