"""How Hopper's products of some rows with FP8 and with four bits are cut up.

Legend: T tokens, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import BLOCK
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

MMA_M = 64
"""Tokens that are the left operand, the first of them the GEMM's."""
_NARROWEST = 8
"""Outputs that a tile can be made wider by: rows of TMA's swizzle."""
_WIDE_STAGES, _SPLIT_STAGES = 8, 6
"""Steps that are under way at a time, of all inputs and of a share."""
_FP8_ROWS = (16, 32, 64)
_BLOCK_N, _SOME_N, _FEW_N = 128, 64, 32
"""Outputs of a program: of products with many, with some and with few, that fewer programs would
leave SMs idle of."""
_PROGRAMS = 2
"""That an SM should have, at least."""
_LEAST_SHARE = 4 * BLOCK
"""Inputs of a program: of a single step there is no loop, and Triton 3.6 fails at that."""
_INT4_ROWS = (8, 16, 32)
"""Of 64 rows each warp reads so much of them from shared memory that Triton's kernel is faster."""


class Scaled(Protocol):
    """A quantised weight, as far as tiles depend on it: see `products.forms.Matrix`."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def is_blocked(self) -> bool: ...

    @property
    def group(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiles:
    """Of `block_m` tokens, of which those past the last are dropped, and `block_n` outputs."""

    block_m: int
    block_n: int
    split_k: int

    @property
    def is_swapped(self) -> bool:
        """Whether the weights are the left operand."""
        return self.block_m < MMA_M

    @property
    def mma_n(self) -> int:
        """Outputs that are multiplied at a time, the tile's first."""
        return max(64, next_power_of_2(self.block_n))

    @property
    def num_stages(self) -> int:
        return _WIDE_STAGES if self.split_k == 1 else _SPLIT_STAGES


def find_fp8_tiles(num_tokens: int, weight: Scaled, chip: Chip) -> RowTiles | None:
    """Tiles of the GEMM if this kernel can do it: all SMs get as much of the weight."""
    block_m = next((rows for rows in _FP8_ROWS if num_tokens <= rows), 0)
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    if not block_m or not weight.is_blocked or num_inputs % BLOCK:
        return None
    tiles = RowTiles(block_m=block_m, block_n=128, split_k=1)
    if num_outputs > chip.num_sms * 64:
        rounds = cdiv(num_outputs, chip.num_sms * 128)
        block_n = cdiv(num_outputs, chip.num_sms * rounds)
        return replace(tiles, block_n=cdiv(block_n, _NARROWEST) * _NARROWEST)
    split_k, units = 1, cdiv(num_outputs, tiles.block_n)
    while 2 * units * split_k <= chip.num_sms and num_inputs % (4 * split_k * BLOCK) == 0:
        split_k *= 2
    return replace(tiles, split_k=split_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class NibbleTiles:
    """Of `block_m` tokens, of which those past the last are dropped. Two programs have room in an
    SM's shared memory, or more."""

    block_m: int
    split_k: int
    whole_n: int
    """Outputs of a program that multiplies all inputs."""

    @property
    def block_n(self) -> int:
        if self.split_k == 1:
            return self.whole_n
        return _SOME_N if self.block_m <= 8 else _BLOCK_N

    @property
    def num_warps(self) -> int:
        return min(4, self.block_n // 16)

    @property
    def num_blocks(self) -> int:
        """Of inputs that are multiplied at a time."""
        return 2 if self.block_m <= 16 else 1

    @property
    def num_stages(self) -> int:
        return 4 if self.block_m <= 16 else 6


def _has_whole_steps(weight: Scaled) -> bool:
    """Whether a block of inputs has one scale, and steps are whole."""
    is_whole = weight.num_inputs % (2 * BLOCK) == 0
    return weight.group % BLOCK == 0 and is_whole and weight.num_inputs >= _LEAST_SHARE


def find_int4_tiles(num_tokens: int, weight: Scaled, chip: Chip) -> NibbleTiles | None:
    """Tiles of so many rows times the weight if this kernel can do it, so many that they keep
    all SMs loading."""
    block_m = next((rows for rows in _INT4_ROWS if num_tokens <= rows), 0)
    if not block_m or not _has_whole_steps(weight):
        return None
    wanted = _PROGRAMS * chip.num_sms
    widths = (width for width in (_BLOCK_N, _SOME_N) if weight.num_outputs > width * (wanted - 1))
    whole_n = next(widths, _FEW_N)
    # Partials of few outputs cost less than narrow programs do.
    split_n = whole_n if whole_n > _FEW_N else _BLOCK_N
    split_k, num_tiles = 1, cdiv(weight.num_outputs, split_n)
    while num_tiles * split_k < wanted:
        share, rest = divmod(weight.num_inputs, 2 * split_k)
        if rest or share < _LEAST_SHARE or share % (2 * BLOCK):
            break
        split_k *= 2
    return NibbleTiles(block_m=block_m, split_k=split_k, whole_n=whole_n)
