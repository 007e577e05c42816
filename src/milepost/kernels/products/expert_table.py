"""Which kernels multiply routed experts: `EXPERT_KERNELS` is the table, read as `table` is.

Launches depend on shapes alone, never on what was chosen. Rows are a token's, one for each of its
experts; an expert has them on average.

Legend: T tokens, N experts of a token, P = T * N rows, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from milepost.kernels.platform.device import Chip
from milepost.kernels.products.forms.matrix import Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4
from milepost.kernels.products.table import HOPPER, why_no_hopper

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """A row of the table; what it takes is said by `refuses`."""

    name: str
    module: str
    """Under `milepost.kernels`."""
    forms: tuple[type[Any], ...]
    rows: str
    """For people."""
    needs: str = ""
    refuses: Callable[[Mixture, Chip], str]
    """Why the kernel does not serve the mixture; empty if it does."""
    order: str

    def why_not(self, mixture: Mixture, chip: Chip) -> str:
        """Why others serve the mixture; empty if this one may."""
        if mixture.up.form not in self.forms:
            return "another form"
        if self.needs == HOPPER and (reason := why_no_hopper(chip)):
            return reason
        return self.refuses(mixture, chip)


def choose_experts(mixture: Mixture, chip: Chip) -> ExpertKernel:
    """The first kernel of the table that serves the mixture on the chip."""
    return _choose(mixture, chip, why_no_hopper(chip))


@lru_cache(maxsize=1 << 12)
def _choose(mixture: Mixture, chip: Chip, reason: str) -> ExpertKernel:  # noqa: ARG001
    return next(each for each in EXPERT_KERNELS if not each.why_not(mixture, chip))


def expert_refusals(mixture: Mixture, chip: Chip) -> Iterator[tuple[ExpertKernel, str]]:
    """The kernels of the form ahead of the one that serves the mixture, and why they do not."""
    for kernel in EXPERT_KERNELS:
        if mixture.up.form in kernel.forms:
            reason = kernel.why_not(mixture, chip)
            if not reason:
                return
            yield kernel, reason


# --- what a kernel refuses ------------------------------------------------------------------------


def _nothing(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    return ""


def _many(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    return "" if mixture.num_routed <= UNGROUPED else f"more than {UNGROUPED} rows"


def _many_or_small_groups(mixture: Mixture, chip: Chip) -> str:
    return _many(mixture, chip) or _small_groups(mixture)


def _small_groups(mixture: Mixture) -> str:
    return "" if mixture.has_whole_groups else "scales are not of whole blocks"


def _refuses_at_once(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    if mixture.num_tokens > _TOKENS_AT_ONCE:
        return f"more than {_TOKENS_AT_ONCE} tokens"
    up, down = mixture.up, mixture.down
    if not (up.is_blocked and down.is_blocked):
        return "scales are not of whole blocks"
    is_whole = down.num_outputs % (2 * BLOCK) == 0 and up.num_inputs == down.num_outputs
    return "" if mixture.is_gated and is_whole else "sizes are no whole steps, or without gates"


def _refuses_int4_tall(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    if mixture.rows_each <= _FEW_INT4:
        return f"up to {_FEW_INT4} rows an expert"
    if mixture.alignment < 16:
        return "rows are not aligned"
    both = mixture.up, mixture.down
    if any(each.num_outputs % (2 * BLOCK) or each.num_inputs % BLOCK for each in both):
        return "outputs are no whole tiles"
    if any(each.num_inputs <= BLOCK for each in both):
        return "one step of inputs"
    return _small_groups(mixture)


def _refuses_int4_few(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    if mixture.rows_each > _FEW_INT4:
        return f"more than {_FEW_INT4} rows an expert"
    size, hidden_size = mixture.down.num_inputs, mixture.down.num_outputs
    if mixture.up.num_inputs != hidden_size or mixture.up.num_outputs not in (size, 2 * size):
        return "outputs are no whole units"
    return _small_groups(mixture)


def _refuses_tall(mixture: Mixture, chip: Chip) -> str:
    if mixture.rows_each <= _TALL:
        return f"up to {_TALL} rows an expert"
    if not chip.has_tma or chip.shared_bytes < _TALL_BYTES:
        return f"TMA and {_TALL_BYTES >> 10} KiB of shared memory are missing"
    both = mixture.up, mixture.down
    is_whole = all(each.num_outputs % BLOCK == each.num_inputs % BLOCK == 0 for each in both)
    is_blocked = all(each.is_blocked for each in both)
    return "" if is_whole and is_blocked else "scales are not of whole blocks"


def _refuses_unpacked(mixture: Mixture, chip: Chip) -> str:  # noqa: ARG001
    return "" if mixture.rows_each > _UNPACKED else f"up to {_UNPACKED} rows an expert"


def _refuses_raw_tall(mixture: Mixture, chip: Chip) -> str:
    if mixture.rows_each <= _TALL:
        return f"up to {_TALL} rows an expert"
    if not chip.has_tma or chip.shared_bytes < _RAW_TALL_BYTES:
        return f"TMA and {_RAW_TALL_BYTES >> 10} KiB of shared memory are missing"
    is_whole = mixture.down.num_inputs % 64 == 0 and mixture.up.num_inputs % 128 == 0
    return "" if mixture.has_16_bits and is_whole else "sizes are no whole steps"


_QUANTISED, _BLOCKED = (Fp8, Int4, Fp4), (Fp8, Int4)
_FEW_ROWS = f"up to {UNGROUPED} in all"

EXPERT_KERNELS: tuple[ExpertKernel, ...] = (
    ExpertKernel(
        name="raw gemv",
        module="products.portable.raw_gemv_experts",
        forms=(Raw,),
        rows=_FEW_ROWS,
        refuses=_many,
        order="lanes, tree",
    ),
    ExpertKernel(
        name="raw grouped, tall",
        module="products.portable.raw_grouped_large",
        forms=(Raw,),
        rows=f"from {_TALL + 1} an expert",
        needs="TMA",
        refuses=_refuses_raw_tall,
        order="64 seq",
    ),
    ExpertKernel(
        name="raw grouped",
        module="products.portable.raw_grouped",
        forms=(Raw,),
        rows="any",
        refuses=_nothing,
        order="64 or 128 seq, by rows",
    ),
    ExpertKernel(
        name="gemv, Hopper",
        module="products.hopper.gemv_experts",
        forms=_BLOCKED,
        rows=_FEW_ROWS,
        needs=HOPPER,
        refuses=_many_or_small_groups,
        order="8 parts, 128 seq; a token's experts in one sum",
    ),
    ExpertKernel(
        name="gemv",
        module="products.portable.quantised_gemv_experts",
        forms=_QUANTISED,
        rows=_FEW_ROWS,
        refuses=_many_or_small_groups,
        order="lanes, tree",
    ),
    ExpertKernel(
        name="fp8 in one launch, Hopper",
        module="products.hopper.fp8_experts",
        forms=(Fp8,),
        rows=f"up to {_TOKENS_AT_ONCE} tokens",
        needs=HOPPER,
        refuses=_refuses_at_once,
        order="128 seq",
    ),
    ExpertKernel(
        name="int4 grouped, tall, Hopper",
        module="products.hopper.int4_grouped_up",
        forms=(Int4,),
        rows=f"from {_FEW_INT4 + 1} an expert",
        needs=HOPPER,
        refuses=_refuses_int4_tall,
        order="128 seq",
    ),
    ExpertKernel(
        name="int4 in one launch, Hopper",
        module="products.hopper.int4_experts",
        forms=(Int4,),
        rows=f"up to {_FEW_INT4} an expert",
        needs=HOPPER,
        refuses=_refuses_int4_few,
        order="128 seq",
    ),
    ExpertKernel(
        name="fp8 grouped, tall, Hopper",
        module="products.hopper.fp8_grouped_up",
        forms=(Fp8,),
        rows=f"from {_TALL + 1} an expert",
        needs=HOPPER,
        refuses=_refuses_tall,
        order="128 seq",
    ),
    ExpertKernel(
        name="fp8 grouped, tall",
        module="products.portable.fp8_grouped",
        forms=(Fp8,),
        rows=f"from {_TALL + 1} an expert",
        needs="TMA",
        refuses=_refuses_tall,
        order="128 seq",
    ),
    ExpertKernel(
        name="16-bit weights made first, raw grouped",
        module="products.portable.unpack",
        forms=(Int4, Fp4),
        rows=f"from {_UNPACKED + 1} an expert",
        refuses=_refuses_unpacked,
        order="64 seq",
    ),
    ExpertKernel(
        name="grouped",
        module="products.portable.quantised_grouped",
        forms=_QUANTISED,
        rows="any",
        refuses=_nothing,
        order="128 seq",
    ),
)
