"""Paged, causal, grouped-query attention: KV is written to pages and always read from there.

This is the door to the op: callers import it from here, whatever computes it. A layer makes two
calls: `prepare` does everything between the projection and attention, `attend` everything up to the
output projection. `AttentionOperation.lay_out` chooses the kernels by the device's capabilities,
and returns what the two calls go by: `AttentionItems` or `AttentionRows`. `latent` is the same for
latent attention, `table` says which kernel serves what, and `reference` is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from milepost.kernels.attention import items, reference, rows, table
from milepost.kernels.attention.items import AttentionItems, Tiling
from milepost.kernels.attention.pages import PagedKV, rows_per_page
from milepost.kernels.attention.rows import AttentionRows
from milepost.kernels.attention.table import CAPTURED_TOKENS
from milepost.kernels.layout.batch import Batch
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.device import Chip

__all__ = [
    "AttentionItems",
    "AttentionLayout",
    "AttentionOperation",
    "AttentionRows",
    "HeadNorm",
    "PagedKV",
    "attend",
    "prepare",
    "rows_per_page",
]

AttentionLayout = AttentionItems | AttentionRows

HeadNorm = Literal["each", "none"]
"""Whether query and key heads are normed, each by itself."""


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
    """Only the tokens after which a prefill samples attend."""

    def lay_out(self, batch: Batch) -> AttentionLayout | None:
        """Items for the fused kernels, or rows for the reference."""
        if self.last_tokens_only:
            if not batch.capacity.ends_early:
                return None
            batch = batch.ends()
        if batch.chip is None:
            return rows.lay_out(batch, self.first_row)
        max_dequantised = _max_dequantised(batch)
        group, tokens_each = self.num_heads // self.num_kv_heads, 1 + batch.capacity.num_drafts
        tiling = Tiling(
            heads_per_kv=group,
            num_kv_heads=self.num_kv_heads,
            page_size=batch.page_size,
            num_programs=batch.chip.num_sms,
            shapes=table.shape_heads(
                group,
                self.head_dim,
                batch.chip,
                tokens_each=tokens_each,
                has_fp8_kv=batch.has_float8_kv,
                dequantises=max_dequantised > 0,
            ),
            tokens_each=tokens_each,
            max_dequantised=max_dequantised,
            capacity=None if batch.capacity.is_exact else batch.capacity,
        )
        return items.lay_out(batch.starts, batch.lengths, batch.rows, tiling, batch.tables)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's."""
        return ""


def _max_dequantised(batch: Batch) -> int:
    """Pages of FP8 that a step may also have in 16 bits: those of the longest sequence possible, or
    of any sequences whose tokens are all new."""
    capacity = batch.capacity
    if not batch.has_float8_kv or capacity.decodes or capacity.num_tokens <= CAPTURED_TOKENS:
        return 0
    new_pages = capacity.num_tokens // batch.page_size + capacity.num_sequences
    return int(batch.tables.shape[1]) + new_pages


def prepare(
    operation: AttentionOperation,
    projected: Tensor,
    norm_scale: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    kv: PagedKV,
    kv_rows: Tensor,
    layout: AttentionLayout,
) -> Tensor:
    """Norm, rotate and store: see `reference.prepare`. `kv_rows` [T] are the step's."""
    common, num_heads = (projected, norm_scale, eps, angles), operation.num_heads
    if isinstance(layout, AttentionRows):
        return reference.prepare(*common, kv.pool, layout, num_heads=num_heads, kv_scales=kv.scales)
    from milepost.kernels.attention.portable import prepare

    return prepare.prepare(*common, kv, kv_rows, num_heads=num_heads)


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    layout: AttentionLayout,
    scale: float,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """Attend to pages and gate: see `reference.attend`. The output is handed on as `emit` asks."""
    if isinstance(layout, AttentionRows):
        return reference.attend(query, gate, kv.pool, layout, scale, kv.scales)
    from milepost.kernels.attention import run

    return run.attend(query, gate, kv, layout, scale, emit=emit)
