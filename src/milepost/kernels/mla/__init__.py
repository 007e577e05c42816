"""Paged, causal, multi-head latent attention: latents are written to pages and always read from
there.

This is the door to the op: callers import it from here, whatever computes it. A layer takes two
calls: `store` norms latents and writes them, `attend` does all between the queries, which are
multiplied by the keys' matrices already, and the values' matrices. `MLAOperation.lay_out` chooses
the kernels by the device's capabilities; what it returns is what the two calls go by. `reference`
is the definition, on any device.

Legend: T tokens, H heads, R latent_dim, P shared_dim, E = R + P.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.attention import AttentionItems, AttentionLayout, AttentionRows, items
from milepost.kernels.attention.reference import lay_out
from milepost.kernels.layout.batch import Batch
from milepost.kernels.mla import reference
from milepost.kernels.platform.device import Chip

__all__ = ["AttentionItems", "AttentionRows", "MLAOperation", "attend", "store"]

_MIN_ROWS, _WIDE_ROWS = 16, 64
"""Of tiles: sums of a row take as many registers as a latent is wide."""
_NARROW_UNIT = 32
"""KV of a narrow item, or a multiple: a token's heads are so many rows that a program takes a while
for little KV."""
_MAX_LATENT = 512
_WIDE_BYTES = 160 << 10
"""Shared memory from which on wide tiles fit; where entries are large, it has to hold their rows
and the least block."""
_LEAST_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAOperation:
    """Attention of these sizes."""

    num_heads: int
    latent_dim: int
    shared_dim: int
    value_bytes: int = 2
    """Of an entry of the queries."""

    def lay_out(self, batch: Batch) -> AttentionLayout:
        """Items for the fused kernels, or rows for the reference."""
        if batch.chip is None:
            return lay_out(batch)
        one_token = max(_MIN_ROWS, 1 << (self.num_heads - 1).bit_length())
        # From 64 rows on Blackwell's matrix units take over, which want far more shared memory.
        width = self.latent_dim + self.shared_dim
        held = (_WIDE_ROWS + _LEAST_BLOCK) * width * self.value_bytes
        has_room = batch.chip.shared_bytes >= max(_WIDE_BYTES, held)
        is_large = has_room and batch.chip.capability[0] != 10
        tiling = items.Tiling(
            heads_per_kv=self.num_heads,
            num_kv_heads=1,
            page_size=batch.page_size,
            num_programs=batch.chip.num_sms,
            narrow_rows=one_token,
            narrow_unit=_NARROW_UNIT,
            wide_rows=_WIDE_ROWS if is_large else one_token,
            capacity=None if batch.capacity.is_exact else batch.capacity,
        )
        return items.lay_out(batch.starts, batch.lengths, batch.rows, tiling, batch.tables)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's."""
        if self.num_heads > _WIDE_ROWS:
            return f"the fused ones have up to {_WIDE_ROWS} heads, not {self.num_heads}"
        if self.latent_dim > _MAX_LATENT:
            return f"the fused ones have latents up to {_MAX_LATENT}, not {self.latent_dim}"
        return ""


def store(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    pool: Tensor,
    kv_rows: Tensor,
    layout: AttentionLayout,
    kv_scale: Tensor | None = None,
) -> None:
    """Norm and write: see `reference.store`. `kv_rows` [T] are the step's."""
    if isinstance(layout, AttentionRows):
        return reference.store(projected, norm_weight, eps, pool, layout, kv_scale)
    from milepost.kernels.mla import triton_store

    return triton_store.store(projected, norm_weight, eps, pool, kv_rows, kv_scale)


def attend(
    query: Tensor,
    shared_query: Tensor,
    pool: Tensor,
    tables: Tensor | None,
    layout: AttentionLayout,
    scale: float,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Attend to pages: see `reference.attend`. `tables` are those on the device, which items name
    rows of."""
    if isinstance(layout, AttentionRows):
        return reference.attend(query, shared_query, pool, layout, scale, kv_scale)
    from milepost.kernels.mla import triton

    return triton.attend(query, shared_query, pool, tables, layout, scale, kv_scale)
