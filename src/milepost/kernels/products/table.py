"""The table of dense kernels, `PRODUCTS`, says which of them multiplies rows with a weight.

Legend: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import HOPPER, Kernel, KernelTable, RowRange
from milepost.kernels.products import tiles
from milepost.kernels.products.forms.matrix import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4

_HOPPER_WEIGHTS = 1 << 22
"""Fewest weights for which Hopper's FP8 kernel of some rows is the fastest."""
_RING_WEIGHTS = 1 << 24
"""Fewest weights of one row that pass through a ring in shared memory."""
_PARTS, _TILE = 8, 16
"""Warps, and outputs of a tile, in `hopper.gemv_parts`."""
_MOST_BESIDE = 128
"""Raw outputs of a product beside another, at most: each unit reads all rows."""
_MANY_ROWS = 64
"""Above this, torch's GEMM is as fast as ours, or it pays off to make 16-bit weights first."""
_NORMED_INPUTS, _NORMED_OUTPUTS = 4096, 512
"""Sizes of products that take no longer than the norm before them, at most."""


class Product(NamedTuple):
    """A product of rows with a weight, as far as it decides which kernel runs."""

    weight: Matrix
    num_rows: int
    epilogue: Epilogue = Epilogue.NONE
    has_bias: bool = False
    alignment: int = 16
    """Elements that rows' addresses are multiples of, and those of raw weights."""
    is_contiguous: bool = True
    """Whether a row's values are adjacent."""
    num_beside: int = 0
    """Raw outputs of a product beside this one."""

    @property
    def form(self) -> type[Any]:
        return self.weight.form

    @property
    def is_row(self) -> bool:
        """Whether it is a matrix-vector product whose scales belong to whole blocks."""
        return self.num_rows == 1 and self.weight.has_whole_groups

    def count(self, unit: str) -> float:  # noqa: ARG002
        return self.num_rows

    def why_not(self, kernel: Kernel[Any]) -> str:
        if self.epilogue not in kernel.epilogues:
            return f"no epilogue {self.epilogue.value}"
        if self.has_bias and not kernel.takes_bias:
            return "no bias"
        if self.form is Raw:
            return ""
        if not self.is_contiguous:
            return "rows are not contiguous"
        return "inputs are no whole blocks" if self.weight.num_inputs % BLOCK else ""


def _unless_contiguous(product: Product, chip: Chip) -> str:  # noqa: ARG001
    return "" if product.is_contiguous else "rows are not contiguous"


def _refuses_normed(product: Product, chip: Chip) -> str:  # noqa: ARG001
    weight = product.weight
    is_small = weight.num_inputs <= _NORMED_INPUTS and weight.num_outputs <= _NORMED_OUTPUTS
    return "" if is_small else "it takes longer than the norm"


def _refuses_pair(product: Product, chip: Chip) -> str:
    if product.weight.num_inputs > tiles.FEW_INPUTS:
        return f"more than {tiles.FEW_INPUTS} inputs"
    return _unless_contiguous(product, chip)


def _refuses_raw_hopper(product: Product, chip: Chip) -> str:
    if not product.is_contiguous or product.alignment < 8 or product.weight.num_inputs % 8:
        return "TMA cannot copy it"
    return "" if tiles.cut_raw_hopper(product, chip) else "not faster with these sizes"


def _refuses_raw_some(product: Product, chip: Chip) -> str:
    is_few = product.num_rows <= tiles.FEW_ROWS or product.weight.num_outputs <= tiles.FEW_OUTPUTS
    if is_few or product.epilogue is Epilogue.FLOAT32:
        return _unless_contiguous(product, chip)
    return "torch's GEMM is as fast"


def _unless_row(product: Product, chip: Chip) -> str:  # noqa: ARG001
    return "" if product.is_row else "scales are not of whole blocks"


def _refuses_gated_row(product: Product, chip: Chip) -> str:
    if product.epilogue is Epilogue.GATED and (product.has_bias or product.weight.num_outputs % 2):
        return "gates and ups are no halves"
    return _unless_row(product, chip)


def _refuses_ring(product: Product, chip: Chip) -> str:
    weight = product.weight
    if weight.num_weights < _RING_WEIGHTS:
        return f"less than {_RING_WEIGHTS >> 20} Mi weights"
    if weight.num_inputs % (_PARTS * BLOCK) or weight.num_outputs % _TILE:
        return "parts are not equally long"
    return _refuses_gated_row(product, chip)


def _refuses_fp8_hopper(product: Product, chip: Chip) -> str:
    if product.is_row:
        return "one row"
    if product.weight.num_weights < _HOPPER_WEIGHTS:
        return f"less than {_HOPPER_WEIGHTS >> 20} Mi weights"
    if product.num_beside > _MOST_BESIDE:
        return f"more than {_MOST_BESIDE} outputs beside"
    if product.num_beside and product.alignment < 8:
        return "TMA cannot copy what is beside"
    return "" if tiles.cut_fp8_hopper(product, chip) else "scales are not of whole blocks"


def _refuses_int4_hopper(product: Product, chip: Chip) -> str:
    if product.is_row:
        return "one row"
    if product.alignment < 16:
        return "rows are not aligned"
    return "" if tiles.cut_int4_hopper(product, chip) else "steps are not whole"


def _refuses_library(product: Product, chip: Chip) -> str:
    """Serves whole lines of scales, on Hopper alone."""
    weight = product.weight
    if chip.capability != (9, 0) or chip.arch == "cpu":
        return "torch takes these blocks on sm_90 alone"
    is_block = weight.rows == weight.depth == BLOCK
    is_whole = weight.num_inputs % (4 * BLOCK) == 0 and weight.num_outputs % 16 == 0
    return "" if is_block and is_whole else "scales are not of whole blocks"


_QUANTISED, _BLOCKED = (Fp8, Int4, Fp4), (Fp8, Int4)
_ONE, _MANY = RowRange(most=1), RowRange(above=_MANY_ROWS)
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
        cut=tiles.cut_gemv,
        order="lanes, tree",
    ),
    Kernel(
        name="raw gemv of two rows",
        module="products.portable.raw_gemv",
        entry="multiply_pair",
        forms=(Raw,),
        rows=_ONE,
        epilogues=(Epilogue.PAIR,),
        refuses=_refuses_pair,
        order="lanes, tree",
    ),
    Kernel(
        name="raw gemv of heads",
        module="products.portable.raw_gemv",
        entry="multiply_heads",
        forms=(Raw,),
        rows=_ONE,
        epilogues=(Epilogue.HEADS,),
        refuses=_unless_contiguous,
        order="lanes, tree",
    ),
    Kernel(
        name="norm and raw gemv",
        module="norm.triton",
        entry="add_norm_and_multiply",
        forms=(Raw,),
        rows=_ONE,
        epilogues=(Epilogue.NORMED,),
        refuses=_refuses_normed,
        order="lanes, tree",
    ),
    Kernel(
        name="raw small_m, Hopper",
        module="products.hopper.raw_small_m",
        forms=(Raw,),
        rows=RowRange(above=1, most=_MANY_ROWS),
        needs=HOPPER,
        epilogues=_PLAIN,
        takes_bias=False,
        refuses=_refuses_raw_hopper,
        cut=tiles.cut_raw_hopper,
        order="64 seq",
    ),
    Kernel(
        name="raw small_m",
        module="products.portable.raw_small_m",
        forms=(Raw,),
        rows=RowRange(above=1, most=2 * _MANY_ROWS),
        epilogues=_ALL,
        refuses=_refuses_raw_some,
        cut=tiles.cut_raw,
        order="{tiles.tiles.block_k} seq",
    ),
    Kernel(
        name="torch's GEMM",
        module="products.library",
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
        rows=RowRange(most=_MANY_ROWS),
        needs=HOPPER,
        epilogues=(*_PLAIN, Epilogue.BESIDE),
        takes_bias=False,
        refuses=_refuses_fp8_hopper,
        cut=tiles.cut_fp8_hopper,
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
        cut=tiles.cut_int4_hopper,
        order="128 seq, by fragments",
    ),
    Kernel(
        name="torch's scaled GEMM",
        module="products.library",
        entry="run_scaled",
        forms=(Fp8,),
        rows=_MANY,
        needs="torch's block scales (sm_90)",
        epilogues=_PLAIN,
        refuses=_refuses_library,
        order="128 seq",
    ),
    Kernel(
        name="16-bit weights made first, torch's GEMM",
        module="products.library",
        entry="run_unpacked",
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
        cut=tiles.cut_quantised,
        order="128 seq",
    ),
)
