"""How products and experts are cut up on any chip: tiles of the portable kernels. Needs no Triton.

The time of few rows is that of reading the weight once. A weight with few outputs is also cut along
its inputs, so that every SM reads some of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from milepost.kernels.platform.device import Chip
from milepost.kernels.products.expert_table import SEARCHED, adds_up_alike
from milepost.kernels.products.forms import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, FP4_LANE, Fp4, Fp8, Int4, Int8
from milepost.kernels.products.forms.w4a4 import W4A4

if TYPE_CHECKING:
    from milepost.kernels.products.run import RoutedRows
    from milepost.kernels.products.table import Product

FEW_OUTPUTS = 1024
"""Up to this many outputs, torch's GEMM leaves most SMs idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Programs of `block_m` rows and `block_n` outputs, `block_k` inputs at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    """Whether the weight is the left operand, which fills the tall side of tensor cores if rows are
    few."""
    scales_first: bool = False
    """Whether Int4 weights are scaled before they are multiplied, instead of their groups' sums:
    with many rows there are more sums than weights."""
    steps: int = 1
    """Steps of the loop that share barriers, and whose weights are loaded together."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that a kernel is compiled for."""
        return {
            "block_m": self.block_m,
            "block_n": self.block_n,
            "block_k": self.block_k,
            "steps": self.steps,
            "is_swapped": self.is_swapped,
            "scales_first": self.scales_first,
        }

    def fitted(self, chip: Chip, *, num_weights: int = 1, num_bytes: int = 2) -> Tiles:
        """Returns tiles with as many stages as the chip has room for in types of `num_bytes`; a
        step holds tiles of `num_weights` weights."""
        step = (self.block_m + num_weights * self.block_n) * self.block_k * num_bytes
        return replace(self, num_stages=chip.choose_stages(self.num_stages, step))


def choose_split_k(num_outputs: int, num_inputs: int, tiles: Tiles, num_sms: int) -> int:
    """Returns the number of split-K parts that gives nearly every SM a program in a GEMM of few
    rows.

    Up to half as many start while the kernel before still runs; more would crowd on the few SMs
    that are free by then.
    """
    split_k, programs = 1, -(-num_outputs // tiles.block_n)
    wanted = num_programs(num_sms)
    while programs * split_k < wanted and num_inputs >= 4 * split_k * tiles.block_k:
        split_k *= 2
    return split_k


def num_programs(num_sms: int) -> int:
    """Returns the number of programs of a GEMM of few rows: one for nearly every SM."""
    return 1 << (num_sms.bit_length() - 1)


def make_tiles(
    block_m: int,
    block_n: int,
    num_warps: int = 4,
    num_stages: int = 4,
    *,
    block_k: int = BLOCK,
    is_swapped: bool = True,
) -> Tiles:
    """Returns tiles; most have the weight as the left operand."""
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        is_swapped=is_swapped,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTiles:
    """Tiles, and parts along the inputs."""

    tiles: Tiles
    split_k: int


# --- quantised weights ----------------------------------------------------------------------------

FEW = make_tiles(16, 128, is_swapped=False)
SOME, MORE = replace(FEW, block_m=32), replace(FEW, block_m=64)
MANY = replace(FEW, block_m=128, num_warps=8)
_FEW_SPLIT = replace(FEW, block_n=256, num_warps=8)
"""Tiles of up to 16 rows of FP8 that are multiplied with split-K."""
OF_TENSOR_MEMORY = {MORE: replace(MORE, num_warps=8), MANY: replace(MANY, block_n=64)}
"""Tiles on sm_100, where a step's products are read from tensor memory to be scaled: each thread
spills 650 to 1,200 bytes with the other tiles, and none with these."""

_EIGHT, _SIXTEEN, _THIRTY_TWO = make_tiles(8, 128, 8, 3), make_tiles(16, 128, 8), make_tiles(32, 64)
_SIXTY_FOUR, _SIXTY_FOUR_SPLIT = make_tiles(64, 64, 4, 3), make_tiles(64, 128, 8, 3)
"""Tiles of four-bit weights, by their number of rows; the last ones are for split-K."""
_SPLIT_OUTPUTS = 4096
"""Largest number of outputs of weights in four bits, or in FP8, that are multiplied with
split-K."""
_WIDE = replace(make_tiles(64, 128, 4, 3), is_swapped=False, scales_first=True)
_WIDE_UNITS = 4 * BLOCK
_FEW_EXPERT = make_tiles(8, 64, 4), make_tiles(8, 128, 4)
_FEW_INT4, _FEW_FP4 = (replace(make_tiles(8, 64, 4, stages), steps=2) for stages in (3, 2))
"""Tiles of both projections of experts with few rows, and of first ones with longer rounds."""
_MANY_OUTPUTS, _OF_MANY, _OF_MANY_GROUPS = 16384, make_tiles(16, 64, 2), make_tiles(8, 64, 4)
"""Fewest outputs for which nine to sixteen rows of Int4 get narrow tiles: one tile of all rows,
whose weights are unpacked once, or two where groups are so small that weights are scaled first."""
_FEW_EACH = 6
"""Largest number of rows per expert, on average, for tiles of eight rows: more rows would need two
tiles."""


def choose_gemm(num_rows: float, weight: Matrix, chip: Chip) -> Tiles:
    """Returns the tiles of a quantised GEMM with this many rows."""
    if weight.form in (Fp8, Int8, W4A4):
        is_split = weight.form is Fp8 and weight.num_outputs <= _SPLIT_OUTPUTS
        more = _SIXTY_FOUR_SPLIT if is_split and chip.has_wide_mma else MORE
        return next((each for each in (FEW, SOME, more) if num_rows <= each.block_m), MANY)
    is_large = weight.num_outputs >= _MANY_OUTPUTS and not weight.order.is_fixed
    if is_large and weight.form is Int4 and _EIGHT.block_m < num_rows <= _SIXTEEN.block_m:
        if weight.group >= FP4_LANE:
            return _OF_MANY
        if num_rows <= _most_in_eights(weight, chip):
            return _OF_MANY_GROUPS
    if num_rows <= _most_in_eights(weight, chip):
        return _EIGHT
    if num_rows <= _THIRTY_TWO.block_m:
        return _SIXTEEN if num_rows <= _SIXTEEN.block_m else _THIRTY_TWO
    return _SIXTY_FOUR_SPLIT if weight.num_outputs <= _SPLIT_OUTPUTS else _SIXTY_FOUR


def choose_experts(rows_each: float, weight: Matrix, chip: Chip) -> tuple[Tiles, Tiles]:
    """Returns the tiles of both projections of four-bit experts with `rows_each` rows each."""
    if rows_each > _FEW_EACH:
        return _THIRTY_TWO, _THIRTY_TWO
    if not _most_in_eights(weight, chip):
        return replace(_SIXTEEN, block_n=64, num_warps=4), _SIXTEEN
    if weight.form is Int4 and weight.group < FP4_LANE:
        return (_FEW_EXPERT[0],) * 2
    return _FEW_INT4 if weight.form is Int4 else _FEW_FP4, _FEW_EXPERT[1]


def _most_in_eights(weight: Matrix, chip: Chip) -> int:
    """Returns the most rows that are multiplied in tiles of eight. Hopper uses other instructions
    for those, with other bits, and multiplies 16 rows faster in two tiles than in one; AMD's matrix
    units have no tiles of eight."""
    if weight.order.is_fixed or chip.is_amd:
        return 0
    return 16 if chip.has_wide_mma else 8


def cut_quantised(product: Product, chip: Chip) -> SplitTiles:
    """Returns the tiles of quantised weights for any number of rows."""
    weight, num_rows = product.weight, product.num_rows
    tiles, split_k = choose_gemm(num_rows, weight, chip), 1
    has_parts = product.epilogue is Epilogue.PARTIALS and not product.is_whole
    is_narrow = weight.form is Fp8 and weight.num_outputs <= _SPLIT_OUTPUTS
    if tiles == FEW and has_parts and is_narrow and chip.has_wide_mma:
        tiles = _FEW_SPLIT
    if chip.capability[0] == 10 and weight.form is not W4A4:
        tiles = OF_TENSOR_MEMORY.get(tiles, tiles)
    tiles = tiles.fitted(chip, num_bytes=1 if weight.form in (Int8, W4A4) else 2)
    if num_rows <= MORE.block_m and has_parts:
        split_k = choose_split_k(weight.num_outputs, weight.num_inputs, tiles, chip.num_sms)
    return SplitTiles(tiles=tiles, split_k=split_k)


# --- grouped experts ------------------------------------------------------------------------------

_LARGE = make_tiles(64, 128, block_k=64, is_swapped=False)
_REGIMES = (
    (10, make_tiles(16, 64, num_stages=3), make_tiles(16, 128, num_stages=3)),
    (32, make_tiles(32, 64, num_stages=5, block_k=64), replace(_LARGE, block_m=32)),
    (float("inf"), _LARGE, _LARGE),
)
"""Tiles of both projections, with the most rows per expert, on average, that they serve."""
_SEARCHED = replace(_REGIMES[0][1], block_k=64, num_stages=5), _REGIMES[0][2]
"""Tiles of both projections for tokens that are not grouped by expert."""
_NARROWEST = 32
"""Fewest outputs of a tile that has the order of larger ones."""
_FLOAT32 = make_tiles(16, 32, num_stages=2, block_k=32, is_swapped=False)
"""Tiles for float32, which tensor cores do not multiply exactly."""


def choose_grouped(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Returns the tiles of both projections of experts whose rows are grouped."""
    if not isinstance(routed.up, Raw):
        return _choose_quantised(routed)
    up = down = _FLOAT32
    if routed.rows.dtype != torch.float32:
        if routed.up.order.is_fixed and not adds_up_alike(routed.mixture, routed.chip):
            # Only the largest tiles have the order of blocks that are larger still.
            up = _spread(_LARGE, routed.size, routed)
            down = _spread(_LARGE, routed.down.num_outputs, routed)
        elif len(routed.experts) <= SEARCHED:
            up, down = _SEARCHED
        else:
            _, up, down = next(each for each in _REGIMES if routed.rows_each <= each[0])
    up = _dividing(up, routed.up.num_inputs).fitted(routed.chip, num_weights=2)
    if not routed.is_gated:
        # As many rows of weights in a tile as of gates and up projections together.
        up = replace(up, block_n=2 * up.block_n)
    return up, _dividing(down, routed.size).fitted(routed.chip)


def choose_many(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Returns the tiles of both projections of four-bit experts with many rows each."""
    # With a sum less in its registers, an SM runs three programs instead of two if memory allows.
    # Experts of 512 units have four steps, which are faster in one round.
    is_one_round = isinstance(routed.down, Int4) and routed.size == _WIDE_UNITS
    down = replace(_WIDE, num_stages=2, steps=4 if is_one_round else 1)
    return _WIDE.fitted(routed.chip, num_weights=1 + routed.is_gated), down.fitted(routed.chip)


def _spread(tiles: Tiles, num_outputs: int, routed: RoutedRows) -> Tiles:
    """Returns narrower tiles of the same order if tokens are so few that some SMs would have
    none."""
    block_n, num_hit = tiles.block_n, min(routed.num_routed, routed.num_experts)
    while block_n > _NARROWEST and num_hit * num_outputs < routed.chip.num_sms * block_n:
        block_n //= 2
    return replace(tiles, block_n=block_n)


def _dividing(tiles: Tiles, num_inputs: int) -> Tiles:
    """Returns tiles with steps of half as many inputs, and twice the stages, if only such steps are
    whole."""
    half = tiles.block_k // 2
    if num_inputs % tiles.block_k == 0 or num_inputs % half:
        return tiles
    return replace(tiles, block_k=half, num_stages=2 * tiles.num_stages)


def _choose_quantised(routed: RoutedRows) -> tuple[Tiles, Tiles]:
    """Returns tiles with the weight as the left operand."""
    chip, down = routed.chip, Matrix.of(routed.down)
    if down.form in (Int4, Fp4):
        up_tiles, down_tiles = choose_experts(routed.rows_each, down, chip)
        return up_tiles.fitted(chip, num_weights=1 + routed.is_gated), down_tiles.fitted(chip)
    if down.form is W4A4:  # 128 outputs at a time; sums of gates and ups of 128 rows find no room
        wide = choose_gemm(min(routed.rows_each, MORE.block_m), down, chip)
        return (wide.fitted(chip, num_weights=2, num_bytes=1),) * 2
    wide = choose_gemm(routed.rows_each, down, chip)
    wide = wide.fitted(chip, num_bytes=1 if down.form is Int8 else 2)
    # Gates and ups have a sum each, in wide tiles too many for the registers. Few rows are read 5 %
    # faster by twice as many warps.
    is_few = wide.block_m == FEW.block_m and isinstance(routed.down, Fp8) and chip.has_wide_mma
    num_warps = 8 if is_few or wide.block_m == MANY.block_m else 4
    return replace(wide, block_n=64, num_warps=num_warps), wide
