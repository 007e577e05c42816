"""Paged, causal, grouped-query attention: KV is written to pages and always read from there.

This is the door to the op: callers import it from here, whatever computes it. A layer takes two
calls: `prepare` does all that lies between the projection and attention, `attend` all until the
output projection. `AttentionOperation.lay_out` chooses the kernels by the device's capabilities;
what it returns, `AttentionItems` or `AttentionRows`, is what the two calls go by. `reference` is
the definition, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from milepost.kernels.attention import items, reference
from milepost.kernels.attention.cuts import WAVES
from milepost.kernels.attention.items import (
    NARROW_ROWS,
    AttentionItems,
    Tiling,
    choose_narrow_rows,
    choose_wide_rows,
)
from milepost.kernels.attention.pages import rows_per_page
from milepost.kernels.attention.reference import AttentionRows
from milepost.kernels.layout.batch import Batch
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.device import Chip, why_no_gluon

__all__ = [
    "AttentionItems",
    "AttentionLayout",
    "AttentionOperation",
    "AttentionRows",
    "HeadNorm",
    "attend",
    "prepare",
    "rows_per_page",
]


_FLOAT8_BESIDE = 3
"""Narrow items that share an SM. Blocks of float8 take half the room, and half as long to come; so
what a program does between two of them is hidden by another program."""
_HOPPER_HEAD = 256
"""What Hopper's kernel for decodes over float8 takes, which has half as many rows where that is
enough, and two programs an SM."""
_HOPPER_ROWS, _HOPPER_BESIDE, _HOPPER_WAVES = 8, 2, 4
_FEW_TOKENS = 512
"""Steps up to so many are captured, and what a graph reads must not depend on a step's pages."""
AttentionLayout = AttentionItems | AttentionRows

HeadNorm = Literal["each", "none"]
"""Whether query and key heads are normed, each by itself."""


class _Narrow(NamedTuple):
    """Rows of narrow items, how many share an SM, and how many of them follow each other there."""

    rows: int
    num_beside: int = 1
    most_waves: int = WAVES


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperation:
    """Attention of these sizes and kind."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: HeadNorm = "each"
    first_row: int = 0
    """KV before this position is not attended to."""
    last_tokens_only: bool = False
    """Only the tokens behind which a prefill samples attend."""

    def lay_out(self, batch: Batch) -> AttentionLayout | None:
        """Items for the fused kernels, or rows for the reference."""
        if self.last_tokens_only:
            if not batch.capacity.ends_early:
                return None
            batch = batch.ends()
        if batch.chip is None:
            return reference.lay_out(batch, self.first_row)
        max_dequantised = _max_dequantised(batch)
        narrow = self._choose_narrow(batch, batch.chip)
        takes_apart = batch.has_float8_kv and not max_dequantised
        tiling = Tiling(
            heads_per_kv=self.num_heads // self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=batch.page_size,
            num_programs=batch.chip.num_sms,
            num_beside=narrow.num_beside,
            narrow_rows=narrow.rows,
            narrow_waves=narrow.most_waves,
            tokens_each=1 + batch.capacity.num_drafts,
            wide_rows=choose_wide_rows(
                self.head_dim,
                batch.chip.shared_bytes,
                takes_apart=takes_apart and batch.chip.unpacks_fp8,
            ),
            max_dequantised=max_dequantised,
            capacity=None if batch.capacity.is_exact else batch.capacity,
        )
        return items.lay_out(batch.starts, batch.lengths, batch.rows, tiling, batch.tables)

    def _choose_narrow(self, batch: Batch, chip: Chip) -> _Narrow:
        """How narrow items are cut up."""
        group, tokens = self.num_heads // self.num_kv_heads, 1 + batch.capacity.num_drafts
        rows = choose_narrow_rows(group, tokens)
        if not batch.has_float8_kv:
            return _Narrow(rows)
        if rows > NARROW_ROWS or self.head_dim != _HOPPER_HEAD or why_no_gluon(chip):
            return _Narrow(rows, num_beside=_FLOAT8_BESIDE)
        rows = choose_narrow_rows(group, tokens, _HOPPER_ROWS)
        return _Narrow(rows, num_beside=_HOPPER_BESIDE, most_waves=_HOPPER_WAVES)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's."""
        return ""


def _max_dequantised(batch: Batch) -> int:
    """Pages of float8 that a step may have in 16 bits too: those of the longest sequence that there
    may be, or of any whose tokens are all new."""
    capacity = batch.capacity
    if not batch.has_float8_kv or capacity.decodes or capacity.num_tokens <= _FEW_TOKENS:
        return 0
    new_pages = capacity.num_tokens // batch.page_size + capacity.num_sequences
    return int(batch.tables.shape[1]) + new_pages


def prepare(
    operation: AttentionOperation,
    projected: Tensor,
    norm_scale: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    pool: Tensor,
    kv_rows: Tensor,
    layout: AttentionLayout,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Norm, turn and store: see `reference.prepare`. `kv_rows` [T] are the step's."""
    if isinstance(layout, AttentionRows):
        return reference.prepare(
            projected,
            norm_scale,
            eps,
            angles,
            pool,
            layout,
            num_heads=operation.num_heads,
            kv_scales=kv_scales,
        )
    from milepost.kernels.attention import triton_prepare

    return triton_prepare.prepare(
        projected,
        norm_scale,
        eps,
        angles,
        pool,
        kv_rows,
        num_heads=operation.num_heads,
        kv_scales=kv_scales,
    )


def attend(
    query: Tensor,
    gate: Tensor | None,
    pool: Tensor,
    tables: Tensor | None,
    layout: AttentionLayout,
    scale: float,
    kv_scales: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """Attend to pages and gate: see `reference.attend`. `tables` are those on the device, which
    items name rows of. The output is handed on as `emit` asks."""
    if isinstance(layout, AttentionRows):
        return reference.attend(query, gate, pool, layout, scale, kv_scales)
    from milepost.kernels.attention import triton

    return triton.attend(query, gate, pool, tables, layout, scale, kv_scales, emit=emit)
