"""Paged, causal attention, to heads in groups or to latents: KV is written to pages and always read
from there.

Callers import attention from here, whichever kernels run. A layer makes two calls: `prepare` or
`store_latents` does everything between the projection and attention, `attend` everything up to the
output projection. With latents the layer multiplies queries by the keys' matrices before, and
outputs by the values' after. An operation's `lay_out` chooses the kernels by the device, and
returns the layout for both calls: `AttentionItems` or `AttentionRows`, or `IndexedTokens` with an
indexer. `table` says which kernel serves what, and `reference` is the definition.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.attention import indexed, items, pages, reference, table
from milepost.kernels.attention.indexed import IndexedTokens, Selection
from milepost.kernels.attention.items import AttentionItems, Tiling
from milepost.kernels.attention.pages import AttentionRows, PagedKV, rows_per_page
from milepost.kernels.attention.reference import TurnedEntries
from milepost.kernels.attention.table import ATTENTION
from milepost.kernels.layout.batch import Batch, Operation
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder

__all__ = [
    "ATTENTION",
    "AttentionItems",
    "AttentionLayout",
    "AttentionOperation",
    "AttentionRows",
    "IndexedTokens",
    "LatentOperation",
    "PagedKV",
    "Selection",
    "TurnedEntries",
    "attend",
    "prepare",
    "rows_per_page",
    "store_latents",
]

AttentionLayout = AttentionItems | AttentionRows | IndexedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOperation(Operation):
    """Attention to heads of these sizes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_row: int = 0
    """Position of the first KV that is attended to."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None for all before it."""
    is_indexed: bool = False
    """Whether an indexer selects the tokens to attend to: see `indexed`."""
    last_tokens_only: bool = False
    """Whether only tokens that are sampled from attend."""
    order: SumOrder = SumOrder.FREE
    """If FIXED, a token's bits depend on its position and KV alone."""

    def lay_out(self, batch: Batch) -> AttentionLayout | None:
        """Returns items for the fused kernels, or rows for the reference."""
        if self.window is not None:
            batch = batch.in_windows()
        if self.last_tokens_only:
            if not batch.capacity.ends_early:
                return None
            batch = batch.ends()
        if batch.chip is None:
            return pages.lay_out(batch, self.first_row, self.window, order=self.order)
        if self.is_indexed:
            return indexed.lay_out(batch)
        group, tokens_each = self.num_heads // self.num_kv_heads, 1 + batch.capacity.num_drafts
        tokens_each = 1 if self.order.is_fixed else tokens_each
        # Few pages of a window's table are read.
        max_dequantised = 0
        if not (self.order.is_fixed or self.window):
            page = self.num_kv_heads, self.head_dim, batch.page_size, batch.capacity.num_tokens
            max_dequantised = _max_dequantised(batch, table.most_copied(*page, batch.chip))
        shapes = table.shape_heads(
            group,
            self.head_dim,
            batch.chip,
            tokens_each=tokens_each,
            has_fp8_kv=batch.has_float8_kv,
            dequantises=max_dequantised > 0,
        )
        tiling = items.tile(batch, batch.chip, shapes, group, self.num_kv_heads)
        tiling = tiling._replace(
            tokens_each=tokens_each,
            max_dequantised=max_dequantised,
            window=self.window,
            order=max(tiling.order, self.order),
        )
        return _lay_out(batch, tiling)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentOperation(Operation):
    """Attention to latents of these sizes."""

    num_heads: int
    latent_dim: int
    shared_dim: int
    value_bytes: int = 2
    """Bytes of an entry of the queries."""
    first_row: int = 0
    """Position of the first latent that is attended to."""
    order: SumOrder = SumOrder.FREE
    """If FIXED, a token's bits depend on its position and KV alone."""

    def lay_out(self, batch: Batch) -> AttentionLayout:
        """Returns items for the fused kernels, or rows for the reference."""
        if batch.chip is None:
            return pages.lay_out(batch, self.first_row, order=self.order)
        width, value_bytes = self.latent_dim + self.shared_dim, self.value_bytes
        shapes = table.shape_latents(self.num_heads, width, batch.chip, value_bytes=value_bytes)
        tiling = items.tile(batch, batch.chip, shapes, self.num_heads, 1)
        return _lay_out(batch, tiling._replace(order=max(tiling.order, self.order)))

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """Why no kernel attends to such latents; empty if one does."""
        return table.why_no_latents(self.num_heads, self.latent_dim)


def _lay_out(batch: Batch, tiling: Tiling) -> AttentionItems:
    return items.lay_out(
        batch.starts, batch.lengths, batch.rows, tiling, batch.tables, batch.num_decodes
    )


def _max_dequantised(batch: Batch, limit: int) -> int:
    """Returns the most pages of FP8 that a step may also have in 16 bits: enough for the longest
    possible sequence, or for any sequences whose tokens are all new. It is at most `limit`, and 0
    if this step's prefills read more."""
    capacity, page_size = batch.capacity, batch.page_size
    if not limit or not batch.has_float8_kv or capacity.decodes:
        return 0
    new_pages = capacity.num_tokens // page_size + capacity.num_sequences
    pages = int(batch.tables.shape[1]) + new_pages
    if pages <= limit:
        return pages
    ends = (batch.starts + batch.lengths)[batch.lengths > 1 + capacity.num_drafts]
    return limit if int((-(-ends // page_size)).sum()) <= limit else 0


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
    """Norms, rotates and stores: see `reference.prepare`. `kv_rows` [T] are the rows of the step's
    KV."""
    common, num_heads = (projected, norm_scale, eps, angles), operation.num_heads
    if isinstance(layout, AttentionRows):
        return reference.prepare(*common, kv, layout, num_heads=num_heads)
    from milepost.kernels.attention.portable import prepare

    order = layout.tiling.order if isinstance(layout, AttentionItems) else operation.order
    return prepare.prepare(*common, kv, kv_rows, num_heads=num_heads, order=order)


def store_latents(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    kv: PagedKV,
    kv_rows: Tensor,
    layout: AttentionLayout,
    turned: TurnedEntries | None = None,
) -> None:
    """Norms, rotates and stores: see `reference.store_latents`. `kv_rows` [T] are the rows of the
    step's latents."""
    if isinstance(layout, AttentionRows):
        return reference.store_latents(projected, norm_weight, eps, kv, layout, turned)
    from milepost.kernels.attention.portable import latents

    return latents.store_latents(projected, norm_weight, eps, kv, kv_rows, turned)


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    layout: AttentionLayout,
    scale: float,
    *,
    shared_query: Tensor | None = None,
    selection: Selection | None = None,
) -> Tensor:
    """Attends to pages and gates: see `reference.attend`, or `indexed.attend` if there is a
    `selection`."""
    if selection is not None:
        assert isinstance(layout, AttentionRows | IndexedTokens), "layouts of an indexer"
        return indexed.attend(query, gate, kv, layout, scale, selection)
    assert not isinstance(layout, IndexedTokens), "a selection comes with them"
    if isinstance(layout, AttentionRows):
        return reference.attend(query, gate, kv, layout, scale, shared_query)
    from milepost.kernels.attention import run

    return run.attend(query, gate, kv, layout, scale, shared_query=shared_query)
