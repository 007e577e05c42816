"""Which kernel multiplies rows with a weight: `PRODUCTS` is the table.

Legend: T tokens, I inputs, O outputs, S splits along I.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import choose_split_k
from milepost.kernels.products.forms.matrix import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4
from milepost.kernels.products.hopper import quantised_tiles as hopper_tiles
from milepost.kernels.products.hopper import raw_tiles as raw_hopper
from milepost.kernels.products.kernels import HOPPER, Kernel, KernelTable, RowRange
from milepost.kernels.products.portable import quantised_tiles, raw_tiles

_HOPPER_WEIGHTS = 1 << 22
"""Weights at least of products of some rows that Hopper's own kernel is fastest for."""
_RING_WEIGHTS = 1 << 24
"""And of a row's that pass through a ring in shared memory."""
_PARTS, _TILE = 8, 16
"""Warps and outputs of a program of one row (`quantised.row_gluon`)."""
MANY_ROWS = 64
"""From so many on torch's GEMM is as fast as ours, or it is faster to make 16-bit weights first."""
_FEW = 128
"""RowRange up to which raw weights have kernels of ours."""


class Product(NamedTuple):
    """What decides which kernel multiplies rows with a weight."""

    weight: Matrix
    num_rows: int
    epilogue: Epilogue = Epilogue.NONE
    has_bias: bool = False
    alignment: int = 16
    """Elements of 16 bits that the addresses of rows, and of raw weights, are multiples of."""
    is_contiguous: bool = True
    """Whether a row's values are adjacent."""

    @property
    def form(self) -> type[Any]:
        return self.weight.form

    @property
    def is_row(self) -> bool:
        """Whether it is a matrix-vector product whose scales belong to whole blocks."""
        return self.num_rows == 1 and self.weight.has_whole_groups

    @property
    def num_weights(self) -> int:
        return self.weight.num_outputs * self.weight.num_inputs

    def count(self, unit: str) -> float:  # noqa: ARG002
        return self.num_rows

    def why_not(self, kernel: Kernel[Any]) -> str:
        if self.epilogue not in kernel.epilogues:
            return f"no epilogue {self.epilogue.value}"
        return "" if kernel.takes_bias or not self.has_bias else "no bias"


# --- what a kernel refuses, and how it cuts a product up ------------------------------------------


def _may_split(product: Product) -> bool:
    """Whether somebody adds split-K partials up."""
    return product.epilogue is Epilogue.PARTIALS


def _unless_contiguous(product: Product, chip: Chip) -> str:  # noqa: ARG001
    return "" if product.is_contiguous else "rows are not contiguous"


def _refuses_raw_hopper(product: Product, chip: Chip) -> str:
    if not product.is_contiguous or product.alignment < 8 or product.weight.num_inputs % 8:
        return "TMA cannot copy it"
    return "" if _cut_raw_hopper(product, chip) else "not faster with these sizes"


def _cut_raw_hopper(product: Product, chip: Chip) -> raw_hopper.HopperTiles | None:
    shape = product.weight.num_outputs, product.weight.num_inputs
    is_whole = product.epilogue is Epilogue.NONE
    return raw_hopper.find_tiles(product.num_rows, shape, chip.num_sms, is_whole=is_whole)


def _refuses_raw_some(product: Product, chip: Chip) -> str:
    if not product.is_contiguous:
        return _unless_contiguous(product, chip)
    is_served = product.num_rows <= raw_tiles.FEW_ROWS.block_m
    is_served |= product.weight.num_outputs <= raw_tiles.FEW_OUTPUTS
    return "" if is_served or product.epilogue is Epilogue.FLOAT32 else "torch's GEMM is as fast"


def _cut_raw_some(product: Product, chip: Chip) -> raw_tiles.SplitTiles:
    shape = product.weight.num_outputs, product.weight.num_inputs
    is_precise = product.epilogue is Epilogue.FLOAT32
    return raw_tiles.cut(product.num_rows, shape, chip, is_precise=is_precise)


def _unless_row(product: Product, chip: Chip) -> str:  # noqa: ARG001
    return "" if product.is_row else "scales are not of whole blocks"


def _refuses_gated_row(product: Product, chip: Chip) -> str:
    if product.epilogue is Epilogue.GATED and (product.has_bias or product.weight.num_outputs % 2):
        return "gates and ups are no halves"
    return _unless_row(product, chip)


def _refuses_ring(product: Product, chip: Chip) -> str:
    weight = product.weight
    if product.num_weights < _RING_WEIGHTS:
        return f"less than {_RING_WEIGHTS >> 20} Mi weights"
    if weight.num_inputs % (_PARTS * BLOCK) or weight.num_outputs % _TILE:
        return "parts are not equally long"
    return _refuses_gated_row(product, chip)


def _refuses_fp8_hopper(product: Product, chip: Chip) -> str:
    if product.is_row:
        return "one row"
    if product.num_weights < _HOPPER_WEIGHTS:
        return f"less than {_HOPPER_WEIGHTS >> 20} Mi weights"
    return "" if _cut_fp8_hopper(product, chip) else "scales are not of whole blocks"


def _cut_fp8_hopper(product: Product, chip: Chip) -> hopper_tiles.RowTiles | None:
    tiles = hopper_tiles.find_fp8_tiles(product.num_rows, product.weight, chip)
    return tiles if tiles is None or _may_split(product) else replace(tiles, split_k=1)


def _refuses_int4_hopper(product: Product, chip: Chip) -> str:
    if product.is_row:
        return "one row"
    if product.alignment < 16:
        return "rows are not aligned"
    return "" if _cut_int4_hopper(product, chip) else "steps are not whole"


def _cut_int4_hopper(product: Product, chip: Chip) -> hopper_tiles.NibbleTiles | None:
    tiles = hopper_tiles.find_int4_tiles(product.num_rows, product.weight, chip)
    return tiles if tiles is None or _may_split(product) else replace(tiles, split_k=1)


def _refuses_library(product: Product, chip: Chip) -> str:
    """On Hopper alone, and whole lines of scales."""
    weight = product.weight
    if chip.capability != (9, 0) or chip.arch == "cpu":
        return "torch takes these blocks on sm_90 alone"
    is_block = weight.rows == weight.depth == BLOCK
    is_whole = weight.num_inputs % (4 * BLOCK) == 0 and weight.num_outputs % 16 == 0
    return "" if is_block and is_whole else "scales are not of whole blocks"


def _cut_gemm(product: Product, chip: Chip) -> raw_tiles.SplitTiles:
    weight = product.weight
    is_fp8 = weight.form is Fp8
    tiles, split_k = quantised_tiles.choose_dense(product.num_rows, chip, is_fp8=is_fp8), 1
    if product.num_rows <= quantised_tiles.MORE.block_m and _may_split(product):
        split_k = choose_split_k(weight.num_outputs, weight.num_inputs, tiles, chip.num_sms)
    return raw_tiles.SplitTiles(tiles=tiles, split_k=split_k)


_QUANTISED, _BLOCKED = (Fp8, Int4, Fp4), (Fp8, Int4)
_ONE, _MANY = RowRange(most=1), RowRange(above=MANY_ROWS)
_PLAIN = Epilogue.NONE, Epilogue.PARTIALS
_ALL, _OR_GATED = (*_PLAIN, Epilogue.FLOAT32), (*_PLAIN, Epilogue.GATED)

PRODUCTS: KernelTable[Product] = KernelTable(
    Kernel(
        name="raw gemv",
        module="products.portable.raw_gemv",
        forms=(Raw,),
        rows=_ONE,
        epilogues=_ALL,
        refuses=_unless_contiguous,
        order="lanes, tree",
    ),
    Kernel(
        name="raw small_m, Hopper",
        module="products.hopper.raw_small_m",
        forms=(Raw,),
        rows=RowRange(above=1, most=MANY_ROWS),
        needs=HOPPER,
        epilogues=_PLAIN,
        takes_bias=False,
        refuses=_refuses_raw_hopper,
        cut=_cut_raw_hopper,
        order="64 seq",
    ),
    Kernel(
        name="raw small_m",
        module="products.portable.raw_small_m",
        forms=(Raw,),
        rows=RowRange(above=1, most=_FEW),
        epilogues=_ALL,
        refuses=_refuses_raw_some,
        cut=_cut_raw_some,
        order="{tiles.tiles.block_k} seq",
    ),
    Kernel(
        name="torch's GEMM",
        module="",
        forms=(Raw,),
        epilogues=_ALL,
        order="cuBLAS",
    ),
    Kernel(
        name="fp8 gemv over a ring, Hopper",
        module="products.hopper.gemv_ring",
        forms=(Fp8,),
        rows=_ONE,
        epilogues=_OR_GATED,
        needs=HOPPER,
        refuses=_refuses_ring,
        order="8 parts, 128 seq",
    ),
    Kernel(
        name="gemv, Hopper",
        module="products.hopper.gemv",
        forms=_BLOCKED,
        rows=_ONE,
        epilogues=_OR_GATED,
        needs=HOPPER,
        refuses=_refuses_gated_row,
        order="8 parts, 128 seq",
    ),
    Kernel(
        name="gemv",
        module="products.portable.quantised_gemv",
        forms=_QUANTISED,
        rows=_ONE,
        epilogues=_PLAIN,
        refuses=_unless_row,
        order="lanes, tree",
    ),
    Kernel(
        name="fp8 small_m, Hopper",
        module="products.hopper.fp8_small_m",
        forms=(Fp8,),
        rows=RowRange(most=MANY_ROWS),
        needs=HOPPER,
        epilogues=_PLAIN,
        takes_bias=False,
        refuses=_refuses_fp8_hopper,
        cut=_cut_fp8_hopper,
        order="128 seq",
    ),
    Kernel(
        name="int4 small_m, Hopper",
        module="products.hopper.int4_small_m",
        forms=(Int4,),
        rows=RowRange(most=32),
        needs=HOPPER,
        epilogues=_PLAIN,
        takes_bias=False,
        refuses=_refuses_int4_hopper,
        cut=_cut_int4_hopper,
        order="128 seq",
    ),
    Kernel(
        name="torch's scaled GEMM",
        module="",
        forms=(Fp8,),
        rows=_MANY,
        needs="torch's block scales (sm_90)",
        epilogues=_PLAIN,
        refuses=_refuses_library,
        order="128 seq",
    ),
    Kernel(
        name="16-bit weights made first, torch's GEMM",
        module="products.portable.unpack",
        forms=(Int4, Fp4),
        rows=_MANY,
        epilogues=_PLAIN,
        order="cuBLAS",
    ),
    Kernel(
        name="gemm",
        module="products.portable.quantised_gemm",
        forms=_QUANTISED,
        epilogues=_PLAIN,
        cut=_cut_gemm,
        order="128 seq",
    ),
)
