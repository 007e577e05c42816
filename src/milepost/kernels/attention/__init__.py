"""Paged, causal, grouped-query attention: KV is written to pages and always read from there.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition, in steps (`store`, `decode`, `prefill`) that any device runs. On a GPU a step takes two
calls: `prepare` does all that lies between the projection and attention, `attend` all until the
output projection. Their work is laid out by `lay_out` on the host.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.attention.items import (
    AttentionItems,
    Capacity,
    choose_wide_rows,
    lay_out,
)
from milepost.kernels.attention.pages import (
    DecodePages,
    PrefillPages,
    lay_out_decodes,
    lay_out_prefills,
    rows_per_page,
)
from milepost.kernels.attention.reference import decode, prefill, store

__all__ = [
    "AttentionItems",
    "Capacity",
    "DecodePages",
    "PrefillPages",
    "attend",
    "choose_wide_rows",
    "decode",
    "lay_out",
    "lay_out_decodes",
    "lay_out_prefills",
    "prefill",
    "prepare",
    "rows_per_page",
    "store",
]


def prepare(
    projected: Tensor,
    norm_scale: Tensor,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    pool: Tensor,
    kv_rows: Tensor,
) -> Tensor:
    """Norm, turn and store: see `triton_prepare.prepare`. On a GPU only."""
    from milepost.kernels.attention import triton_prepare

    return triton_prepare.prepare(projected, norm_scale, eps, cosines, sines, pool, kv_rows)


def attend(
    query: Tensor, gate: Tensor, pool: Tensor, tables: Tensor, items: AttentionItems, scale: float
) -> Tensor:
    """Attend to pages and gate: see `triton.attend`. On a GPU only."""
    from milepost.kernels.attention import triton

    return triton.attend(query, gate, pool, tables, items, scale)
