"""The table of expert kernels, `EXPERTS`, says which of them multiply routed experts.

Launches depend on shapes alone, never on the experts chosen. A token has one row for each of its
experts; rows per expert are an average.

Legend: T tokens, N experts of a token, P = T * N rows, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import (
    HOPPER,
    Condition,
    Kernel,
    KernelTable,
    RowRange,
    SumOrder,
    row,
)
from milepost.kernels.products.forms import Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4, Int8
from milepost.kernels.products.forms.w4a4 import W4A4

ROW_BY_ROW = 40
"""Largest number of routed tokens that are multiplied one by one, each rounded on the way: say,
four tokens with nine experts each."""
SEARCHED = 16
"""Largest number of tokens that are not grouped by expert, because programs search the routing for
their rows: as many as the smallest tile has rows."""
_TOKENS_AT_ONCE = 64
"""Largest number of tokens whose FP8 experts Hopper multiplies in one launch."""
_FEW_INT4 = 10
"""Rows per expert above which Hopper multiplies four-bit weights in tall blocks."""
_TALL, _UNPACKED = 32, 112
"""Rows per expert above which GEMMs are compute-bound, and above which unpacking four-bit weights
to 16 bits first is faster."""
_TALL_BYTES, _RAW_TALL_BYTES = 200 << 10, 128 << 10
"""Shared memory in bytes that tall blocks need, rounded up."""
_IN_ALL, _TOKENS, _EACH = "in all", "tokens", "an expert"
"""Units of `RowRange`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Properties of routed experts that decide which kernel runs."""

    up: Matrix
    down: Matrix
    num_experts: int
    num_tokens: int
    num_chosen: int
    alignment: int = 16
    """Alignment in elements of the rows' addresses."""
    has_16_bits: bool = True

    @property
    def form(self) -> type[Any]:
        return self.up.form

    def count(self, unit: str) -> float:
        if unit == _TOKENS:
            return self.num_tokens
        return self.num_routed if unit == _IN_ALL else self.rows_each

    def why_not(self, kernel: Kernel[Any]) -> str:
        is_kept = self.up.order <= kernel.serves
        return "" if is_kept else "its order depends on the number of rows"

    @property
    def weights(self) -> tuple[Matrix, Matrix]:
        return self.up, self.down

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
        return all(each.has_whole_groups for each in self.weights)

    @property
    def has_whole_steps(self) -> bool:
        return all(each.has_whole_steps for each in self.weights)


def adds_up_alike(mixture: Mixture, chip: Chip) -> bool:
    """Whether tiles of raw weights have the same order whatever their sizes, as wgmma's had where
    they were compared: whichever operand has the weights, and however many whole steps there
    are."""
    has_steps = not any(each.num_inputs % 64 for each in mixture.weights)
    return mixture.has_16_bits and has_steps and chip.capability == (9, 0) and chip.arch != "cpu"


# Conditions of kernels, each after the reason that is shown where it does not hold.
# fmt: off
_BLOCKS: Condition[Mixture] = ("scales are not of whole blocks", lambda it, _:
    it.has_whole_groups)
_KEPT: Condition[Mixture] = (_BLOCKS[0], lambda it, chip:
    it.has_whole_steps or (it.form is Fp8 and not chip.rounds_to_fp8))
_BLOCKED: Condition[Mixture] = ("scales are not of whole blocks", lambda it, _:
    it.up.is_blocked and it.down.is_blocked)
_GATED: Condition[Mixture] = ("sizes are no whole steps, or without gates", lambda it, _:
    it.is_gated and it.down.num_outputs % (2 * BLOCK) == 0
    and it.up.num_inputs == it.down.num_outputs)
_ALIGNED: Condition[Mixture] = "rows are not aligned", lambda it, _: it.alignment >= 16
_TILES: Condition[Mixture] = ("outputs are no whole tiles", lambda it, _:
    all(each.num_outputs % (2 * BLOCK) == each.num_inputs % BLOCK == 0 for each in it.weights))
_STEPS: Condition[Mixture] = ("one step of inputs", lambda it, _:
    all(each.num_inputs > BLOCK for each in it.weights))
_UNITS: Condition[Mixture] = ("outputs are no whole units", lambda it, _:
    it.up.num_inputs == it.down.num_outputs
    and it.up.num_outputs in (it.down.num_inputs, 2 * it.down.num_inputs))
_ROOM: Condition[Mixture] = (
    f"TMA and {_TALL_BYTES >> 10} KiB of shared memory are missing",
    lambda _, chip: chip.has_tma and chip.shared_bytes >= _TALL_BYTES)
_WHOLE: Condition[Mixture] = ("scales are not of whole blocks", lambda it, _:
    all(each.num_outputs % BLOCK == each.num_inputs % BLOCK == 0 for each in it.weights)
    and it.up.is_blocked and it.down.is_blocked)
_RAW_ROOM: Condition[Mixture] = (
    f"TMA and {_RAW_TALL_BYTES >> 10} KiB of shared memory are missing",
    lambda _, chip: chip.has_tma and chip.shared_bytes >= _RAW_TALL_BYTES)
_RAW_WHOLE: Condition[Mixture] = ("sizes are no whole steps", lambda it, _:
    it.has_16_bits and it.down.num_inputs % 64 == it.up.num_inputs % 128 == 0)

_FP4: Condition[Mixture] = ("the chip multiplies no four-bit floats", lambda _, chip:
    chip.has_fp4)
_ALIKE: Condition[Mixture] = ("tiles of other sizes add up in another way",
    lambda it, chip: adds_up_alike(it, chip))
_WIDE: Condition[Mixture] = ("matrix units read weights from registers", lambda _, chip:
    chip.has_wide_mma)

_RAW, _QUANTISED, _INT8 = (Raw,), (Fp8, Int4, Fp4), (Int8,)
_FEW = RowRange(most=ROW_BY_ROW, unit=_IN_ALL)
_MANY = RowRange(above=_TALL, unit=_EACH)
_SOME = RowRange(above=_TALL, most=_UNPACKED, unit=_EACH)
_FIXED: dict[str, Any] = {"serves": SumOrder.FIXED}
_MEMORY: dict[str, Any] = {"needs": "wgmma or tcgen05", "entry": "run_many"}

EXPERTS: KernelTable[Mixture] = KernelTable(
    row("raw gemv", "products.portable.gemv", _RAW, "lanes, tree", rows=_FEW,
        entry="run_experts"),
    row("raw grouped, tall", "products.portable.grouped_large", _RAW, "64 seq",
        _RAW_ROOM, _RAW_WHOLE, rows=_MANY, needs="TMA", **_FIXED),
    row("raw grouped, one order", "products.portable.grouped", _RAW, "64 seq", _ALIKE,
        needs="wgmma (sm_90)", **_FIXED),
    row("raw grouped", "products.portable.grouped", _RAW, "64 or 128 seq, by rows", **_FIXED),
    row("gemv, Hopper", "products.hopper.gemv", (Fp8,),
        "8 parts, 128 seq; a token's experts in one sum", _BLOCKS, rows=_FEW, needs=HOPPER,
        entry="run_experts"),
    row("int4 gemv, Hopper", "products.hopper.int4_row", (Int4,), "parts, 8 groups each",
        rows=_FEW, needs=HOPPER, entry="run_experts"),
    row("int8 gemv", "products.portable.gemv", _INT8, "int32, exact", _BLOCKS, rows=_FEW,
        entry="run_experts", **_FIXED),
    row("gemv", "products.portable.gemv", _QUANTISED, "lanes, tree", _KEPT, rows=_FEW,
        entry="run_experts"),
    row("fp8 in one launch, Hopper", "products.hopper.fp8_experts", (Fp8,), "128 seq",
        _BLOCKED, _GATED, rows=RowRange(most=_TOKENS_AT_ONCE, unit=_TOKENS), needs=HOPPER,
        **_FIXED),
    row("int4 grouped, tall, Hopper", "products.hopper.int4_grouped", (Int4,), "128 seq",
        _ALIGNED, _TILES, _STEPS, rows=RowRange(above=_FEW_INT4, unit=_EACH), needs=HOPPER),
    row("int4 in one launch, Hopper", "products.hopper.int4_experts", (Int4,), "128 seq",
        _UNITS, rows=RowRange(most=_FEW_INT4, unit=_EACH), needs=HOPPER),
    row("fp8 grouped, tall, Hopper", "products.hopper.fp8_grouped", (Fp8,), "128 seq",
        _ROOM, _WHOLE, rows=_MANY, needs=HOPPER, **_FIXED),
    row("fp8 grouped, tall", "products.portable.grouped_large", (Fp8,), "128 seq",
        _ROOM, _WHOLE, rows=_MANY, needs="TMA", **_FIXED),
    row("int4 grouped, wide", "products.portable.grouped", (Int4,), "64 seq", _WIDE,
        rows=_MANY, **_MEMORY),
    row("fp4 grouped, wide", "products.portable.grouped", (Fp4,), "64 seq", _WIDE,
        rows=_SOME, **_MEMORY),
    row("16-bit weights made first, raw grouped", "products.library",
        (Int4, Fp4), "64 seq", rows=RowRange(above=_UNPACKED, unit=_EACH), entry="run_experts"),
    row("int8 grouped", "products.portable.grouped", _INT8, "int32, exact", **_FIXED),
    row("w4a4 grouped", "products.portable.grouped", (W4A4,), "128 seq, by the unit", _FP4,
        needs="FP4 (sm_100, sm_120)"),
    row("grouped", "products.portable.grouped", _QUANTISED, "128 seq", **_FIXED),
)
# fmt: on
