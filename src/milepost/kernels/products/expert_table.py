"""Which kernels multiply routed experts: `EXPERTS` is the table.

Launches depend on shapes alone, never on what was chosen. A token has a row for each of its
experts; an expert has rows on average.

Legend: T tokens, N experts of a token, P = T * N rows, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import HOPPER, Kernel, KernelTable, RowRange
from milepost.kernels.products.forms.matrix import Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4

UNGROUPED = 40
"""Up to so many rows (four tokens, nine experts each) nothing is grouped."""
_TOKENS_AT_ONCE = 64
"""Up to so many tokens Hopper multiplies FP8 experts in one launch."""
_FEW_INT4 = 10
"""Beyond so many rows an expert Hopper multiplies four-bit weights in tall blocks (9 take 244 us,
216 otherwise; 14 take 246 and 300)."""
_TALL, _UNPACKED = 32, 112
"""Beyond so many rows an expert the GEMMs are bound by arithmetic; or it is faster to make 16-bit
weights of four bits first."""
_TALL_BYTES, _RAW_TALL_BYTES = 200 << 10, 128 << 10
"""Shared memory that tall blocks take, and then some."""
_IN_ALL, _TOKENS, _EACH = "in all", "tokens", "an expert"
"""Units of `RowRange`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """All of routed experts that decides which kernels run."""

    up: Matrix
    down: Matrix
    num_experts: int
    num_tokens: int
    num_chosen: int
    alignment: int = 16
    """As a `table.Product` has it."""
    has_16_bits: bool = True

    @property
    def form(self) -> type[Any]:
        return self.up.form

    def count(self, unit: str) -> float:
        if unit == _TOKENS:
            return self.num_tokens
        return self.num_routed if unit == _IN_ALL else self.rows_each

    def why_not(self, kernel: Kernel[Any]) -> str:  # noqa: ARG002
        return ""

    @property
    def num_routed(self) -> int:
        return self.num_tokens * self.num_chosen

    @property
    def rows_each(self) -> float:
        return self.num_routed / self.num_experts

    @property
    def is_gated(self) -> bool:
        return self.up.num_outputs == 2 * self.down.num_inputs

    @property
    def has_whole_groups(self) -> bool:
        return self.up.has_whole_groups and self.down.has_whole_groups


# --- what a kernel refuses ------------------------------------------------------------------------


def _refuses_small_groups(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    return _small_groups(mixture)


def _small_groups(mixture: Mixture) -> str:
    return "" if mixture.has_whole_groups else "scales are not of whole blocks"


def _refuses_at_once(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    up, down = mixture.up, mixture.down
    if not (up.is_blocked and down.is_blocked):
        return "scales are not of whole blocks"
    is_whole = down.num_outputs % (2 * BLOCK) == 0 and up.num_inputs == down.num_outputs
    return "" if mixture.is_gated and is_whole else "sizes are no whole steps, or without gates"


def _refuses_int4_tall(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    if mixture.alignment < 16:
        return "rows are not aligned"
    both = mixture.up, mixture.down
    if any(each.num_outputs % (2 * BLOCK) or each.num_inputs % BLOCK for each in both):
        return "outputs are no whole tiles"
    if any(each.num_inputs <= BLOCK for each in both):
        return "one step of inputs"
    return _small_groups(mixture)


def _refuses_int4_few(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    size, hidden_size = mixture.down.num_inputs, mixture.down.num_outputs
    if mixture.up.num_inputs != hidden_size or mixture.up.num_outputs not in (size, 2 * size):
        return "outputs are no whole units"
    return _small_groups(mixture)


def _refuses_tall(mixture: Mixture, chip: Chip) -> str:
    if not chip.has_tma or chip.shared_bytes < _TALL_BYTES:
        return f"TMA and {_TALL_BYTES >> 10} KiB of shared memory are missing"
    both = mixture.up, mixture.down
    is_whole = all(each.num_outputs % BLOCK == each.num_inputs % BLOCK == 0 for each in both)
    is_blocked = all(each.is_blocked for each in both)
    return "" if is_whole and is_blocked else "scales are not of whole blocks"


def _refuses_raw_tall(mixture: Mixture, chip: Chip) -> str:
    if not chip.has_tma or chip.shared_bytes < _RAW_TALL_BYTES:
        return f"TMA and {_RAW_TALL_BYTES >> 10} KiB of shared memory are missing"
    is_whole = mixture.down.num_inputs % 64 == 0 and mixture.up.num_inputs % 128 == 0
    return "" if mixture.has_16_bits and is_whole else "sizes are no whole steps"


_QUANTISED, _BLOCKED = (Fp8, Int4, Fp4), (Fp8, Int4)
_FEW_ROWS = RowRange(most=UNGROUPED, unit=_IN_ALL)
_MANY_ROWS = RowRange(above=_TALL, unit=_EACH)

EXPERTS: KernelTable[Mixture] = KernelTable(
    Kernel(
        name="raw gemv",
        module="products.portable.gemv_experts",
        forms=(Raw,),
        rows=_FEW_ROWS,
        order="lanes, tree",
    ),
    Kernel(
        name="raw grouped, tall",
        module="products.portable.grouped_large",
        forms=(Raw,),
        rows=_MANY_ROWS,
        needs="TMA",
        refuses=_refuses_raw_tall,
        order="64 seq",
    ),
    Kernel(
        name="raw grouped",
        module="products.portable.grouped",
        forms=(Raw,),
        order="64 or 128 seq, by rows",
    ),
    Kernel(
        name="gemv, Hopper",
        module="products.hopper.gemv_experts",
        forms=_BLOCKED,
        rows=_FEW_ROWS,
        needs=HOPPER,
        refuses=_refuses_small_groups,
        order="8 parts, 128 seq; a token's experts in one sum",
    ),
    Kernel(
        name="gemv",
        module="products.portable.gemv_experts",
        forms=_QUANTISED,
        rows=_FEW_ROWS,
        refuses=_refuses_small_groups,
        order="lanes, tree",
    ),
    Kernel(
        name="fp8 in one launch, Hopper",
        module="products.hopper.fp8_experts",
        forms=(Fp8,),
        rows=RowRange(most=_TOKENS_AT_ONCE, unit=_TOKENS),
        needs=HOPPER,
        refuses=_refuses_at_once,
        order="128 seq",
    ),
    Kernel(
        name="int4 grouped, tall, Hopper",
        module="products.hopper.int4_grouped",
        forms=(Int4,),
        rows=RowRange(above=_FEW_INT4, unit=_EACH),
        needs=HOPPER,
        refuses=_refuses_int4_tall,
        order="128 seq",
    ),
    Kernel(
        name="int4 in one launch, Hopper",
        module="products.hopper.int4_experts",
        forms=(Int4,),
        rows=RowRange(most=_FEW_INT4, unit=_EACH),
        needs=HOPPER,
        refuses=_refuses_int4_few,
        order="128 seq",
    ),
    Kernel(
        name="fp8 grouped, tall, Hopper",
        module="products.hopper.fp8_grouped",
        forms=(Fp8,),
        rows=_MANY_ROWS,
        needs=HOPPER,
        refuses=_refuses_tall,
        order="128 seq",
    ),
    Kernel(
        name="fp8 grouped, tall",
        module="products.portable.grouped_large",
        forms=(Fp8,),
        rows=_MANY_ROWS,
        needs="TMA",
        refuses=_refuses_tall,
        order="128 seq",
    ),
    Kernel(
        name="16-bit weights made first, raw grouped",
        module="products.portable.grouped_unpacked",
        forms=(Int4, Fp4),
        rows=RowRange(above=_UNPACKED, unit=_EACH),
        order="64 seq",
    ),
    Kernel(
        name="grouped",
        module="products.portable.grouped",
        forms=_QUANTISED,
        order="128 seq",
    ),
)
