"""Paged, causal, multi-head latent attention: latents are written to pages and always read from
there.

This is the door to the op: callers import it from here, whatever computes it. A layer makes two
calls: `store` norms latents and writes them, `attend` does everything between the queries, already
multiplied by the keys' matrices, and the values' matrices. `LatentOperation.lay_out` chooses the
kernels by the device's capabilities, and returns what the two calls go by.

Legend: T tokens, H heads, R latent_dim, P shared_dim, E = R + P.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.attention import AttentionLayout, items, reference, rows, table
from milepost.kernels.attention.pages import PagedKV
from milepost.kernels.attention.rows import AttentionRows
from milepost.kernels.layout.batch import Batch
from milepost.kernels.platform.device import Chip

__all__ = ["LatentOperation", "PagedKV", "attend", "store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentOperation:
    """Attention of these sizes."""

    num_heads: int
    latent_dim: int
    shared_dim: int
    value_bytes: int = 2
    """Bytes of an entry of the queries."""

    def lay_out(self, batch: Batch) -> AttentionLayout:
        """Items for the fused kernels, or rows for the reference."""
        if batch.chip is None:
            return rows.lay_out(batch)
        width = self.latent_dim + self.shared_dim
        tiling = items.Tiling(
            heads_per_kv=self.num_heads,
            num_kv_heads=1,
            page_size=batch.page_size,
            num_programs=batch.chip.num_sms,
            shapes=table.shape_latents(
                self.num_heads, width, batch.chip, value_bytes=self.value_bytes
            ),
            capacity=None if batch.capacity.is_exact else batch.capacity,
        )
        return items.lay_out(batch.starts, batch.lengths, batch.rows, tiling, batch.tables)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """Why no kernel attends to such latents; empty if one does."""
        return table.why_no_latents(self.num_heads, self.latent_dim)


def store(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    kv: PagedKV,
    kv_rows: Tensor,
    layout: AttentionLayout,
) -> None:
    """Norm and write: see `reference.store_latents`. `kv_rows` [T] are the step's."""
    if isinstance(layout, AttentionRows):
        reference.store_latents(projected, norm_weight, eps, kv.pool, layout, kv.scales)
        return
    from milepost.kernels.attention.portable import prepare

    prepare.store_latents(projected, norm_weight, eps, kv, kv_rows)


def attend(
    query: Tensor, shared_query: Tensor, kv: PagedKV, layout: AttentionLayout, scale: float
) -> Tensor:
    """Attend to pages: see `reference.attend_latents`."""
    if isinstance(layout, AttentionRows):
        return reference.attend_latents(query, shared_query, kv.pool, layout, scale, kv.scales)
    from milepost.kernels.attention.portable import latent

    return latent.attend(query, shared_query, kv, layout, scale)
