"""The table of dense kernels, `PRODUCTS`, says which of them multiplies rows with a weight.

Legend: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from milepost.kernels.platform.tables import (
    HOPPER,
    Condition,
    Kernel,
    KernelTable,
    RowRange,
    SumOrder,
    row,
)
from milepost.kernels.products.forms import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4, Int8
from milepost.kernels.products.forms.w4a4 import W4A4
from milepost.kernels.products.hopper import tiles as hopper
from milepost.kernels.products.portable import row_tiles, tiles

_HOPPER_WEIGHTS = 1 << 22
"""Fewest weights for which Hopper's FP8 kernel of some rows is the fastest."""
_MANY_WEIGHTS = 1 << 24
"""Fewest weights for which a product of one row streams them through a ring in shared memory (FP8),
or multiplies them with tensor cores (four bits)."""
_NUM_PARTS, _TILE = 8, 16
"""Warps, and outputs of a tile, in `hopper.gemv_parts`."""
_MOST_BESIDE = 128
"""Largest number of raw outputs beside another product: every unit of them reads all rows."""
_MANY_ROWS = 64
"""Rows above which torch's GEMM is as fast as ours, or 16-bit weights are made first."""
_WHOLE_INPUTS = 4096
"""Largest number of inputs of a sum that is about as fast without split-K; raw weights take longer
to read, so theirs may have any number."""
_NORMED_INPUTS, _NORMED_OUTPUTS = 4096, 512
"""Largest sizes of a product that takes no longer than the norm before it."""


class Product(NamedTuple):
    """The properties of a product of rows with a weight that decide which kernel runs."""

    weight: Matrix
    num_rows: int
    epilogue: Epilogue = Epilogue.NONE
    has_bias: bool = False
    alignment: int = 16
    """Alignment in elements of the rows' addresses, and of raw weights'."""
    is_contiguous: bool = True
    """Whether a row's values are adjacent."""
    num_beside: int = 0
    """Outputs of the raw weight that the same launch multiplies; 0 if there is none."""

    @property
    def form(self) -> type[Any]:
        return self.weight.form

    @property
    def is_whole(self) -> bool:
        """Whether split-K is ruled out, even where it would be faster; LIKE_MANY allows it for
        quantised sums of many inputs."""
        order = self.weight.order
        is_short = self.form is Raw or self.weight.num_inputs <= _WHOLE_INPUTS
        return order.is_fixed or (order is SumOrder.LIKE_MANY and is_short)

    @property
    def is_row(self) -> bool:
        """Whether it is a matrix-vector product whose scales belong to whole blocks."""
        return self.num_rows == 1 and self.weight.has_whole_groups

    def count(self, unit: str) -> int:  # noqa: ARG002
        return self.num_rows

    def why_not(self, kernel: Kernel[Any]) -> str:
        if self.weight.order.is_fixed and not self._is_fixed(kernel):
            return "its order depends on the number of rows"
        if self.epilogue not in kernel.epilogues:
            return f"no epilogue {self.epilogue.value}"
        if self.has_bias and not kernel.takes_bias:
            return "no bias"
        if self.form is Raw:
            return ""
        if not self.is_contiguous:
            return "rows are not contiguous"
        return "inputs are no whole blocks" if self.weight.num_inputs % BLOCK else ""

    def _is_fixed(self, kernel: Kernel[Any]) -> bool:
        """Whether the order is the same for any number of rows. Only launches of few rows multiply
        by two weights."""
        return kernel.serves.is_fixed and self.epilogue is not Epilogue.BESIDE


# Conditions of kernels, each after the reason that is shown where it does not hold.
# fmt: off
_CONTIGUOUS: Condition[Product] = "rows are not contiguous", lambda it, _: it.is_contiguous
_ALIGNED: Condition[Product] = "rows are not aligned", lambda it, _: it.alignment >= 16
_ROW: Condition[Product] = "scales are not of whole blocks", lambda it, _: it.is_row
_KEPT_ROW: Condition[Product] = (_ROW[0], lambda it, chip:
    it.weight.has_whole_steps or (it.form is Fp8 and not chip.rounds_to_fp8))
_EXACT: Condition[Product] = ("bias may be added in another way", lambda it, _:
    not (it.weight.order.is_fixed and it.has_bias))
_ROWS: Condition[Product] = ("one row", lambda it, _:
    not it.is_row or it.is_whole)
_INVARIANT: Condition[Product] = ("for batch_invariant", lambda it, _:
    it.weight.order.is_fixed)
_HALVES: Condition[Product] = ("gates and ups are no halves", lambda it, _:
    it.epilogue is not Epilogue.GATED or not (it.has_bias or it.weight.num_outputs % 2))
_SHORT: Condition[Product] = ("it takes longer than the norm", lambda it, _:
    it.weight.num_inputs <= _NORMED_INPUTS and it.weight.num_outputs <= _NORMED_OUTPUTS)
_FREE: Condition[Product] = ("many rows have another order", lambda it, _:
    not it.is_whole or it.weight.order.is_fixed)
_SMALL: Condition[Product] = ("torch's GEMM is as fast", lambda it, _:
    it.num_rows <= row_tiles.FEW_ROWS or it.weight.num_outputs <= tiles.FEW_OUTPUTS
    or it.epilogue is Epilogue.FLOAT32)
_TMA: Condition[Product] = ("TMA cannot copy it", lambda it, _:
    it.is_contiguous and it.alignment >= 8 and it.weight.num_inputs % 8 == 0)
_RAW_SIZES: Condition[Product] = ("not faster with these sizes", lambda it, chip:
    hopper.cut_raw(it, chip) is not None)
_MANY: Condition[Product] = (f"less than {_MANY_WEIGHTS >> 20} Mi weights", lambda it, _:
    it.weight.num_weights >= _MANY_WEIGHTS)
_PARTS: Condition[Product] = ("parts are not equally long", lambda it, _:
    it.weight.num_inputs % (_NUM_PARTS * BLOCK) == it.weight.num_outputs % _TILE == 0)
_LARGE: Condition[Product] = (f"less than {_HOPPER_WEIGHTS >> 20} Mi weights", lambda it, _:
    it.weight.num_weights >= _HOPPER_WEIGHTS)
_BESIDE: Condition[Product] = (f"more than {_MOST_BESIDE} outputs beside", lambda it, _:
    it.num_beside <= _MOST_BESIDE)
_BESIDE_TMA: Condition[Product] = ("TMA cannot copy what is beside", lambda it, _:
    not it.num_beside or it.alignment >= 8)
_FP8_SIZES: Condition[Product] = ("scales are not of whole blocks", lambda it, chip:
    hopper.cut_fp8(it, chip) is not None)
_INT4_SIZES: Condition[Product] = ("steps are not whole", lambda it, chip:
    hopper.cut_int4(it, chip) is not None)
_SM_90: Condition[Product] = ("torch takes these blocks on sm_90 alone", lambda _, chip:
    chip.capability == (9, 0) and chip.arch != "cpu")
_WHOLE: Condition[Product] = ("sums may be split", lambda it, _: it.is_whole)
_COMPARED: Condition[Product] = ("torch's GEMM was compared on sm_90 alone", lambda it, chip:
    chip.capability == (9, 0) and chip.arch != "cpu" and it.weight.num_outputs % 8 == 0)
_FP4: Condition[Product] = ("the chip multiplies no four-bit floats", lambda _, chip:
    chip.has_fp4)
_LINES: Condition[Product] = ("scales are not of whole blocks", lambda it, _:
    it.weight.rows == it.weight.depth == BLOCK
    and it.weight.num_inputs % (4 * BLOCK) == it.weight.num_outputs % 16 == 0)

_RAW, _QUANTISED, _INT8 = (Raw,), (Fp8, Int4, Fp4), (Int8,)
_ONE = RowRange(most=1)
_PLAIN = Epilogue.NONE, Epilogue.PARTIALS
_ALL, _GATED = (*_PLAIN, Epilogue.FLOAT32), (*_PLAIN, Epilogue.GATED)
_HOPPER_FEW: dict[str, Any] = {"needs": HOPPER, "takes_bias": False}

PRODUCTS: KernelTable[Product] = KernelTable(
    row("raw gemv", "products.portable.gemv", _RAW, "lanes, tree", _FREE, _CONTIGUOUS,
        _HALVES, rows=_ONE, epilogues=(*_ALL, Epilogue.GATED), cut=row_tiles.cut_gemv),
    row("norm and raw gemv", "norm.triton", _RAW, "lanes, tree", _SHORT,
        rows=_ONE, epilogues=(Epilogue.NORMED,), entry="add_norm_and_multiply"),
    row("raw small_m, Hopper", "products.hopper.raw_small_m", _RAW, "64 seq", _TMA, _RAW_SIZES,
        rows=RowRange(most=_MANY_ROWS), epilogues=_PLAIN, cut=hopper.cut_raw,
        serves=SumOrder.FIXED, **_HOPPER_FEW),
    row("torch's GEMM, sums whole", "products.library", _RAW, "64 seq", _TMA, _WHOLE, _COMPARED,
        rows=RowRange(above=_MANY_ROWS), epilogues=_PLAIN, takes_bias=False, entry="run_whole",
        serves=SumOrder.FIXED, needs="cuBLAS (sm_90)"),
    row("raw gemm", "products.portable.gemm", _RAW, "64 seq", _INVARIANT,
        _CONTIGUOUS, epilogues=_ALL, cut=row_tiles.cut_raw_invariant, serves=SumOrder.FIXED),
    row("raw small_m", "products.portable.gemm", _RAW, "{tiles.tiles.block_k} seq", _FREE,
        _SMALL, _CONTIGUOUS, rows=RowRange(above=1, most=2 * _MANY_ROWS), epilogues=_ALL,
        cut=row_tiles.cut_raw),
    row("torch's GEMM", "products.library", _RAW, "cuBLAS", epilogues=_ALL),
    row("fp8 gemv over a ring, Hopper", "products.hopper.gemv_ring", (Fp8,), "8 parts, 128 seq",
        _FREE, _MANY, _PARTS, _HALVES, _ROW, rows=_ONE, epilogues=_GATED, needs=HOPPER),
    row("gemv, Hopper", "products.hopper.gemv", (Fp8,), "8 parts, 128 seq", _FREE, _HALVES,
        _ROW, rows=_ONE, epilogues=_GATED, needs=HOPPER),
    row("int4 gemv, Hopper", "products.hopper.int4_row", (Int4,), "parts, 8 groups each", _HALVES,
        _MANY, rows=_ONE, epilogues=_GATED, cut=hopper.cut_int4_row, needs=HOPPER),
    row("int8 gemv", "products.portable.gemv", _INT8, "int32, exact", _ROW, _EXACT,
        rows=_ONE, epilogues=_PLAIN, cut=row_tiles.cut_gemv, serves=SumOrder.FIXED),
    row("gemv", "products.portable.gemv", _QUANTISED, "lanes, tree", _FREE, _KEPT_ROW,
        _HALVES, rows=_ONE, epilogues=_GATED, cut=row_tiles.cut_gemv),
    row("fp8 small_m, Hopper", "products.hopper.fp8_small_m", (Fp8,), "128 seq", _ROWS, _LARGE,
        _BESIDE, _BESIDE_TMA, _FP8_SIZES, rows=RowRange(most=_MANY_ROWS),
        epilogues=(*_PLAIN, Epilogue.BESIDE), cut=hopper.cut_fp8, serves=SumOrder.FIXED,
        **_HOPPER_FEW),
    row("int4 small_m, Hopper", "products.hopper.int4_small_m", (Int4,), "128 seq, by fragments",
        _ROWS, _ALIGNED, _INT4_SIZES, rows=RowRange(most=_MANY_ROWS // 2), epilogues=_PLAIN,
        cut=hopper.cut_int4, **_HOPPER_FEW),
    row("torch's scaled GEMM", "products.library", (Fp8,), "128 seq", _SM_90, _LINES,
        rows=RowRange(above=_MANY_ROWS), epilogues=_PLAIN, entry="run_scaled",
        serves=SumOrder.FIXED, needs="torch's block scales (sm_90)"),
    row("16-bit weights made first, torch's GEMM", "products.library", (Int4, Fp4), "cuBLAS",
        rows=RowRange(above=_MANY_ROWS), epilogues=_PLAIN, entry="run_unpacked"),
    row("int8 gemm", "products.portable.gemm", _INT8, "int32, exact",
        epilogues=_PLAIN, cut=tiles.cut_quantised, serves=SumOrder.FIXED),
    row("w4a4 gemm", "products.portable.gemm", (W4A4,), "128 seq, by the unit", _FP4,
        epilogues=_PLAIN, cut=tiles.cut_quantised, needs="FP4 (sm_100, sm_120)"),
    row("gemm", "products.portable.gemm", _QUANTISED, "128 seq",
        epilogues=_PLAIN, cut=tiles.cut_quantised, serves=SumOrder.FIXED),
)
# fmt: on
