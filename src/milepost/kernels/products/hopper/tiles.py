"""How dense products are cut up for Hopper's kernels. Needs no Triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import cdiv, next_power_of_2
from milepost.kernels.products.forms import Epilogue
from milepost.kernels.products.forms.quantised import BLOCK

if TYPE_CHECKING:
    from milepost.kernels.products.expert_table import Mixture
    from milepost.kernels.products.table import Product

_NARROWEST = 8
"""Outputs that a tile of TMA can grow by: rows of its swizzle."""


RAW_BLOCK_K = 64
"""Inputs of a line of a step: 128 bytes, the widest rows that TMA swizzles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTiles:
    """Tiles of a GEMM whose left operand is the weight."""

    block_m: int
    """Tokens of a tile; results of missing ones are dropped."""
    block_n: int
    """Outputs of a tile: a multiple of 8."""
    num_stages: int
    """Steps that are in flight."""
    max_warps: int
    """Warps that multiply."""
    lines: int = 1
    """Lines of inputs of a step. With more, few rows wait less often for barriers."""
    programs: int = 1
    """Programs that share an SM."""
    split_k: int = 1

    @property
    def mma_m(self) -> int:
        """Rows of weights that an MMA takes; the tile's come first."""
        return 64 if self.block_n <= 64 else 128

    @property
    def num_warps(self) -> int:
        return min(self.max_warps, self.mma_m // 16)


_RAW_STAGES = {16: (12, 10, 8, 0), 32: (11, 8, 6, 10), 64: (9, 12, 12, 10)}
"""Stages by the tokens of a tile: for many outputs; for many inputs and few outputs; for some of
both; for some inputs and few outputs, 0 where other kernels are as fast."""
_WHOLE_STAGES, _NARROW_STAGES = {16: 10, 32: 8, 64: 9}, {16: 10, 32: 9, 64: 6}
"""Stages where sums are not cut into parts, and those of two lines."""
_NARROW, _LEAST_WHOLE_N = 64, 32
"""Outputs of a tile up to which memory is faster than a step's barriers, so that steps have two
lines; and those at least of a tile whose weight has enough for 64 of these."""
_FEW, _SOME, _MANY = range(1 << 11, 1 << 12), range(1 << 12, 1 << 13), range(1 << 13, 1 << 15)
"""Ranges of outputs, or inputs, whose GEMMs gain. With more outputs it does not matter when they
begin; with fewer of both, the portable kernel is as fast."""


def cut_raw(product: Product, chip: Chip) -> RawTiles | None:
    """Returns the tiles of a GEMM if Hopper's kernel is the fastest for it, else None. Without
    `Epilogue.PARTIALS` a separate launch adds up split-K partials."""
    if product.is_whole:
        return _cut_whole(product, chip)
    block_m = _block_of(_RAW_STAGES, product)
    if not block_m or product.num_rows == 1:
        return None
    num_outputs, num_inputs = product.weight.num_outputs, product.weight.num_inputs
    wide, long, square, small = _RAW_STAGES[block_m]
    stages, block_n, warps, programs, split_k = long, 64, 4, 1, 1
    adds_up = product.epilogue is Epilogue.NONE
    is_wide = adds_up and num_outputs in _SOME and num_inputs not in _MANY
    is_narrow = num_outputs in _FEW or num_outputs in _SOME
    if num_outputs in _MANY or is_wide:
        stages, block_n, warps = wide, _spread(num_outputs, chip), 4 if block_m == 16 else 8
    elif is_narrow and (num_inputs in _MANY or (num_inputs in _FEW and not adds_up)):
        programs, split_k = (1, 2) if block_m == 64 else (2, 4)
    elif is_narrow and num_inputs in _SOME:
        stages, split_k = (square, 2) if num_outputs in _SOME else (small, 4)
    else:
        return None
    if not stages or num_inputs % (RAW_BLOCK_K * split_k):
        return None
    return RawTiles(
        block_m=block_m,
        block_n=block_n,
        num_stages=stages,
        max_warps=warps,
        programs=programs,
        split_k=split_k,
    )


def _cut_whole(product: Product, chip: Chip) -> RawTiles | None:
    """Cuts a product whose sums are not cut into parts, since partials' sums would differ from
    those of many rows: narrow tiles fill the SMs."""
    weight = product.weight
    block_m = _block_of(_WHOLE_STAGES, product)
    if not block_m or weight.num_inputs % RAW_BLOCK_K:
        return None
    block_n = _spread(weight.num_outputs, chip)
    if weight.num_outputs >= 64 * _LEAST_WHOLE_N:
        block_n = max(block_n, _LEAST_WHOLE_N)
    is_narrow = block_n <= _NARROW and weight.num_inputs % (2 * RAW_BLOCK_K) == 0
    return RawTiles(
        block_m=block_m,
        block_n=block_n,
        num_stages=(_NARROW_STAGES if is_narrow else _WHOLE_STAGES)[block_m],
        max_warps=4 if block_m == 16 else 8,
        lines=2 if is_narrow else 1,
    )


def _block_of(sizes: Iterable[int], product: Product) -> int:
    """Returns the first of the sizes that holds the product's rows; 0 if there is none."""
    return next((rows for rows in sizes if product.num_rows <= rows), 0)


def _spread(num_outputs: int, chip: Chip) -> int:
    """Returns the width of tiles that gives each SM the same number of tiles."""
    rounds = cdiv(num_outputs, chip.num_sms * _WIDE_N)
    return cdiv(cdiv(num_outputs, chip.num_sms * rounds), _NARROWEST) * _NARROWEST


MMA_M = 64
"""Tokens of the left operand; the GEMM's come first."""
_FP8_ROWS, _INT4_ROWS = (16, 32, 64), (8, 16, 32)
"""Numbers of rows that tiles exist for. The portable kernel takes 64 rows of int4: here each warp
would read too much of them from shared memory."""
_WIDE_N, _SOME_N, _FEW_N = 128, 64, 32
"""Outputs of a program, wide to narrow: products with few outputs need narrow ones to keep SMs
busy."""
_LEAST_FP8_N = {16: 16, 32: 96, 64: 16}
"""Outputs of an FP8 tile of weights that are not split, at least, by its number of rows."""
_LEAST_SHARE = 4 * BLOCK
"""Inputs of a program, at least: Triton 3.6 fails at a loop of a single step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tiles:
    """`block_m` tokens, where those past the last are dropped, and `block_n` outputs."""

    block_m: int
    block_n: int
    split_k: int

    @property
    def is_swapped(self) -> bool:
        """Whether the weights are the left operand."""
        return self.block_m < MMA_M

    @property
    def mma_n(self) -> int:
        """Outputs that are multiplied at a time, half of them by each group of warps."""
        return 2 * MMA_M if self.is_swapped else max(64, next_power_of_2(self.block_n))

    @property
    def box(self) -> int:
        """Rows of weights that TMA copies at a time."""
        part = self.block_n if self.block_n > self.mma_n // 2 else self.block_n // 2
        return part & -part

    @property
    def num_stages(self) -> int:
        return 8 if self.split_k == 1 else 6


def cut_fp8(product: Product, chip: Chip) -> Fp8Tiles | None:
    """Returns tiles that give each SM the same share of the weight, or None if the kernel does not
    serve the product."""
    block_m, weight = _block_of(_FP8_ROWS, product), product.weight
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    if not block_m or not weight.is_blocked or num_inputs % BLOCK:
        return None
    if num_outputs > chip.num_sms * 64 or product.is_whole:
        block_n = _spread(num_outputs, chip)
        if product.is_whole:
            block_n = max(cdiv(block_n, 16) * 16, _LEAST_FP8_N[block_m])
        return Fp8Tiles(block_m=block_m, block_n=block_n, split_k=1)
    split_k, units = 1, cdiv(num_outputs, _WIDE_N)
    while 2 * units * split_k <= chip.num_sms and num_inputs % (4 * split_k * BLOCK) == 0:
        split_k *= 2
    split_k = split_k if product.epilogue is Epilogue.PARTIALS else 1
    return Fp8Tiles(block_m=block_m, block_n=_WIDE_N, split_k=split_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Tiles:
    """`block_m` tokens, where those past the last are dropped. Two programs or more have room in an
    SM's shared memory."""

    block_m: int
    split_k: int
    whole_n: int
    """Outputs of a program that multiplies all inputs."""

    @property
    def block_n(self) -> int:
        if self.split_k == 1:
            return self.whole_n
        return _SOME_N if self.block_m <= 8 else _WIDE_N

    @property
    def num_warps(self) -> int:
        return min(4, self.block_n // 16)

    @property
    def num_blocks(self) -> int:
        """Blocks of inputs that are multiplied at a time."""
        return 2 if self.block_m <= 16 else 1

    @property
    def num_stages(self) -> int:
        return 4 if self.block_m <= 16 else 6


def cut_int4(product: Product, chip: Chip) -> Int4Tiles | None:
    """Returns tiles that keep all SMs loading, or None if the kernel does not serve the product."""
    block_m, weight = _block_of(_INT4_ROWS, product), product.weight
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    if not block_m or num_inputs % (2 * BLOCK) or num_inputs < _LEAST_SHARE:
        return None
    wanted = 2 * chip.num_sms  # programs
    widths = (width for width in (_WIDE_N, _SOME_N) if num_outputs > width * (wanted - 1))
    whole_n = next(widths, _FEW_N)
    # Partials of few outputs cost less than narrow programs do.
    num_tiles = cdiv(num_outputs, whole_n if whole_n > _FEW_N else _WIDE_N)
    split_k = 1
    while product.epilogue is Epilogue.PARTIALS and num_tiles * split_k < wanted:
        share, rest = divmod(num_inputs, 2 * split_k)
        if rest or share < _LEAST_SHARE or share % (2 * BLOCK):
            break
        split_k *= 2
    return Int4Tiles(block_m=block_m, split_k=split_k, whole_n=whole_n)


_SPREAD_OUTPUTS = 1 << 13
"""Outputs from which programs with two tiles keep all SMs loading."""


class Int4RowTiles(NamedTuple):
    """Sizes of a product of one row with four-bit weights: parts of the inputs, one for each warp;
    tiles of 16 outputs of a program, one or two; and blocks of weights that a thread holds."""

    parts: int
    tiles: int
    held: int


def cut_int4_row(product: Product, chip: Chip) -> Int4RowTiles:
    """Returns the tiles of a product of one row."""
    del chip
    is_gated = product.epilogue is Epilogue.GATED
    if is_gated or product.weight.num_outputs >= _SPREAD_OUTPUTS:
        return Int4RowTiles(parts=4, tiles=2, held=5)
    return Int4RowTiles(parts=8, tiles=1, held=6)


def cut_int4_experts(mixture: Mixture) -> tuple[Int4RowTiles, Int4RowTiles]:
    """Returns the tiles of both projections of experts: short rows are a warp's."""
    up = Int4RowTiles(parts=4, tiles=1 + mixture.is_gated, held=5)
    return up, Int4RowTiles(parts=1, tiles=1, held=3)
