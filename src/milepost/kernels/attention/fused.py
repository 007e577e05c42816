"""Attention between its projections, for CUDA: a door that can be imported without triton, which
the calls need.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.attention.items import AttentionItems


def prepare(
    projected: Tensor,
    norm_scale: Tensor,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    pool: Tensor,
    kv_slots: Tensor,
) -> Tensor:
    """See `triton_prepare.prepare`."""
    from milepost.kernels.attention import triton_prepare

    return triton_prepare.prepare(projected, norm_scale, eps, cosines, sines, pool, kv_slots)


def attend(
    query: Tensor, gate: Tensor, pool: Tensor, tables: Tensor, items: AttentionItems, scale: float
) -> Tensor:
    """See `triton.attend`."""
    from milepost.kernels.attention import triton

    return triton.attend(query, gate, pool, tables, items, scale)
