"""Which kernel multiplies what: `KERNELS` is the table, and `choose` the only place that decides.

A row says which forms and how many rows a kernel takes, with which epilogues, what the chip must
have, how a product is cut up, and in which order an output's terms are added: kernels with
different orders give different bits. The first row that serves a product is its kernel; rows behind
it are for those that it refuses. Nothing here needs a GPU, or Triton.

An order "128 seq" adds blocks of 128 inputs one after the other in float32; "split S" adds S parts
of them that were added so, one after the other; "tree" adds parts pairwise.

Legend: T tokens, I inputs, O outputs, S splits along I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from milepost.kernels.platform.device import Chip, why_no_gluon
from milepost.kernels.platform.tiles import choose_split_k
from milepost.kernels.products.forms.matrix import Epilogue, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4
from milepost.kernels.products.hopper import quantised_tiles as hopper_tiles
from milepost.kernels.products.hopper import raw_tiles as raw_hopper
from milepost.kernels.products.portable import quantised_tiles, raw_tiles

_HOPPER_WEIGHTS = 1 << 22
"""Weights at least of products of some rows that Hopper's own kernel is fastest for."""
_RING_WEIGHTS = 1 << 24
"""And of a row's that pass through a ring in shared memory."""
_PARTS, _TILE = 8, 16
"""Warps and outputs of a program of one row (`quantised.row_gluon`)."""
MANY_ROWS = 64
"""From so many on torch's GEMM is as fast as ours, or it is faster to make 16-bit weights first."""
_MOST_REMEMBERED = 1 << 14
"""Choices that are not made again."""
_FEW = 128
"""Rows up to which raw weights have kernels of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """All of a product that decides which kernel runs."""

    weight: Matrix
    num_rows: int
    epilogue: Epilogue = Epilogue.NONE
    has_bias: bool = False
    alignment: int = 16
    """Elements of 16 bits that where rows begin, and how far apart, is a multiple of; and where raw
    weights do."""
    is_contiguous: bool = True
    """A row's numbers stand side by side."""

    @property
    def is_row(self) -> bool:
        """Whether matrix-vector products are made of it: of FP8 whose row is rounded in blocks by
        its own size, and of four bits whose groups are whole blocks."""
        return self.num_rows == 1 and self.weight.has_whole_groups

    @property
    def num_weights(self) -> int:
        return self.weight.num_outputs * self.weight.num_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A row of the table."""

    name: str
    module: str
    """Under `milepost.kernels`; empty for torch's."""
    forms: tuple[type[Any], ...]
    least: int = 1
    most: int | None = None
    """Rows of a product."""
    epilogues: tuple[Epilogue, ...] = (Epilogue.NONE, Epilogue.PARTIALS)
    needs: str = ""
    """What the chip must have: Hopper's own instructions, or nothing."""
    takes_bias: bool = True
    refuses: Callable[[Product, Chip], str]
    """Why the kernel does not serve a product with these rows and epilogue; empty if it does."""
    cut: Callable[[Product, Chip], Any]
    """How the product is cut up."""
    order: str

    @property
    def is_hopper(self) -> bool:
        return self.needs == HOPPER

    def why_not(self, product: Product, chip: Chip) -> str:
        """Why another kernel serves the product; empty if this one may."""
        if product.weight.form not in self.forms:
            return "another form"
        if product.num_rows < self.least or (self.most and product.num_rows > self.most):
            return f"rows: {self.rows}"
        if product.epilogue not in self.epilogues:
            return f"no epilogue {product.epilogue.value}"
        if product.has_bias and not self.takes_bias:
            return "no bias"
        if self.is_hopper and (reason := why_no_hopper(chip)):
            return reason
        return self.refuses(product, chip)

    @property
    def rows(self) -> str:
        """As a table says it."""
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} to {self.most}" if self.most else f"from {self.least}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernel that serves a product, cut up so."""

    kernel: Kernel
    tiles: Any

    @property
    def split_k(self) -> int:
        return getattr(self.tiles, "split_k", 1)

    @property
    def order(self) -> str:
        """Of the terms of an output."""
        split = f", split {self.split_k}" if self.split_k > 1 else ""
        return self.kernel.order.format(tiles=self.tiles) + split


HOPPER = "sm_90"


def choose(product: Product, chip: Chip) -> KernelChoice | None:
    """The first kernel of the table that serves the product on the chip; None where the definition
    in plain torch does."""
    return _choose(product, chip, why_no_hopper(chip))


@lru_cache(maxsize=_MOST_REMEMBERED)
def _choose(product: Product, chip: Chip, reason: str) -> KernelChoice | None:  # noqa: ARG001
    for kernel in KERNELS:
        if not kernel.why_not(product, chip):
            return KernelChoice(kernel=kernel, tiles=kernel.cut(product, chip))
    return None


def why_no_hopper(chip: Chip) -> str:
    """Why Hopper's own kernels do not run on the chip; empty if they do."""
    return "no interpreter runs Gluon" if chip.arch == "cpu" else why_no_gluon(chip)


def refusals(product: Product, chip: Chip) -> Iterator[tuple[Kernel, str]]:
    """The kernels of the product's form ahead of the one that serves it, and why they do not."""
    for kernel in KERNELS:
        if product.weight.form in kernel.forms:
            reason = kernel.why_not(product, chip)
            if not reason:
                return
            yield kernel, reason


# --- what a kernel refuses, and how it cuts a product up ------------------------------------------


def _nothing(product: Product, chip: Chip) -> str:  # noqa: ARG001
    return ""


def _may_split(product: Product) -> bool:
    """Whether somebody adds split-K partials up."""
    return product.epilogue is Epilogue.PARTIALS


def _whole(product: Product, chip: Chip) -> None:
    """Not cut up here."""


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
_ALL = (Epilogue.NONE, Epilogue.PARTIALS, Epilogue.FLOAT32)

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="raw gemv",
        module="products.portable.raw_gemv",
        forms=(Raw,),
        most=1,
        epilogues=_ALL,
        refuses=_unless_contiguous,
        cut=_whole,
        order="lanes, tree",
    ),
    Kernel(
        name="raw small_m, Hopper",
        module="products.hopper.raw_small_m",
        forms=(Raw,),
        least=2,
        most=MANY_ROWS,
        needs=HOPPER,
        takes_bias=False,
        refuses=_refuses_raw_hopper,
        cut=_cut_raw_hopper,
        order="64 seq",
    ),
    Kernel(
        name="raw small_m",
        module="products.portable.raw_small_m",
        forms=(Raw,),
        least=2,
        most=_FEW,
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
        refuses=_nothing,
        cut=_whole,
        order="cuBLAS",
    ),
    Kernel(
        name="fp8 gemv over a ring, Hopper",
        module="products.hopper.gemv_ring",
        forms=(Fp8,),
        most=1,
        epilogues=(Epilogue.NONE, Epilogue.PARTIALS, Epilogue.GATED),
        needs=HOPPER,
        refuses=_refuses_ring,
        cut=_whole,
        order="8 parts, 128 seq",
    ),
    Kernel(
        name="gemv, Hopper",
        module="products.hopper.gemv",
        forms=_BLOCKED,
        most=1,
        epilogues=(Epilogue.NONE, Epilogue.PARTIALS, Epilogue.GATED),
        needs=HOPPER,
        refuses=_refuses_gated_row,
        cut=_whole,
        order="8 parts, 128 seq",
    ),
    Kernel(
        name="gemv",
        module="products.portable.quantised_gemv",
        forms=_QUANTISED,
        most=1,
        refuses=_unless_row,
        cut=_whole,
        order="lanes, tree",
    ),
    Kernel(
        name="fp8 small_m, Hopper",
        module="products.hopper.fp8_small_m",
        forms=(Fp8,),
        most=MANY_ROWS,
        needs=HOPPER,
        takes_bias=False,
        refuses=_refuses_fp8_hopper,
        cut=_cut_fp8_hopper,
        order="128 seq",
    ),
    Kernel(
        name="int4 small_m, Hopper",
        module="products.hopper.int4_small_m",
        forms=(Int4,),
        most=32,
        needs=HOPPER,
        takes_bias=False,
        refuses=_refuses_int4_hopper,
        cut=_cut_int4_hopper,
        order="128 seq",
    ),
    Kernel(
        name="torch's scaled GEMM",
        module="",
        forms=(Fp8,),
        least=MANY_ROWS + 1,
        needs="torch's block scales (sm_90)",
        refuses=_refuses_library,
        cut=_whole,
        order="128 seq",
    ),
    Kernel(
        name="16-bit weights made first, torch's GEMM",
        module="products.portable.unpack",
        forms=(Int4, Fp4),
        least=MANY_ROWS + 1,
        refuses=_nothing,
        cut=_whole,
        order="cuBLAS",
    ),
    Kernel(
        name="gemm",
        module="products.portable.quantised_gemm",
        forms=_QUANTISED,
        refuses=_nothing,
        cut=_cut_gemm,
        order="128 seq",
    ),
)
