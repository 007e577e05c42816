"""Latent attention's kernels beside their reference: what the tests on CPU and GPU share.

Legend: T tokens, H heads, R latent_dim, P shared_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from milepost.kernels import attention
from milepost.kernels.attention import PagedKV, TurnedEntries, rows_per_page
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import FP8, round_fp8
from milepost.runner.staging import on_device
from tests.batches import Part, build_batch, build_pages


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences of a step, with pages of their own in no order; the first `num_decodes` decode."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_decodes: int = 0
    heads: int = 3
    latent: int = 24
    shared: int = 8
    page_size: int = 16
    padding: int = 0
    """Tokens and sequences more than there are."""
    has_float8: bool = False
    """Latents are kept in it."""
    turns: bool = False
    """Entries that all heads share have rotary positions."""


def run(case: Case, chip: Chip | None, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """[T, H, R], padding left out, by the reference or on a chip by the fused kernels: latents of
    the new tokens are stored, and attended to."""
    random = torch.Generator().manual_seed(3)
    ends = [start + length for start, length in zip(case.starts, case.lengths, strict=True)]
    counts = [-(-end // case.page_size) for end in ends]
    ids = torch.randperm(sum(counts), generator=random).add_(1).split(counts)
    pages = [each.tolist() for each in ids]
    width = case.latent + case.shared
    kept, scale = FP8 if case.has_float8 else dtype, torch.full((1,), 0.3, device=device)
    pool = build_pages(sum(counts) + 1, case.page_size, 1, width, kept, device)[:, :1]
    for own, start in zip(pages, case.starts, strict=True):
        latents = torch.randn(start, width, generator=random).to(device, dtype)
        for page, rows in zip(own, latents.split(case.page_size), strict=False):
            pool[page, 0, : len(rows), 0] = round_fp8(rows / scale) if case.has_float8 else rows
    num_tokens, padded = sum(case.lengths), sum(case.lengths) + case.padding
    queries = torch.randn(num_tokens, case.heads, width + 2, generator=random)
    new = torch.randn(num_tokens, width + 5, generator=random)
    weight = torch.randn(case.latent, generator=random).to(device)
    queries, new = (_pad(each.to(device, dtype), padded) for each in (queries, new))
    parts = [
        Part(pages=own, start=start, length=length, slot_in=0, slot_out=1)
        for own, start, length in zip(pages, case.starts, case.lengths, strict=True)
    ]
    batch = build_batch(parts, case.page_size, rows_per_page(pool), case.num_decodes)
    size = {"num_tokens": padded, "num_sequences": len(parts) + case.padding}
    capacity = Capacity(**size, decodes=case.num_decodes == len(parts))
    batch = replace(batch, device=torch.device(device), chip=chip, capacity=capacity)
    operation = attention.LatentOperation(
        num_heads=case.heads, latent_dim=case.latent, shared_dim=case.shared
    )
    layout = operation.lay_out(batch)
    if chip is not None:
        layout = on_device(layout, torch.device(device))
    else:
        queries, new = queries[:num_tokens], new[:num_tokens]
    kv_rows = torch.full((padded,), -1)
    kv_rows[:num_tokens] = torch.from_numpy(batch.kv_rows)
    kv = PagedKV(pool, torch.from_numpy(batch.tables).to(device), scale)
    query = queries[..., : case.latent].contiguous()
    shared, turned = queries[..., case.latent : width], None
    if case.turns:
        angles = torch.randn(2, padded, 1, case.shared // 2, generator=random).to(device, dtype)
        turned = TurnedEntries(*angles[:, : len(new)], shared)
    own = new[:, :width], weight, 1e-6, kv, kv_rows.to(device), layout
    attention.store_latents(*own, turned)
    attended = attention.attend(query, None, kv, layout, 0.2, shared_query=shared)
    return attended.view(query.shape)[:num_tokens]


def _pad(tensor: Tensor, length: int) -> Tensor:
    """Rows of what is no number behind it."""
    padded = tensor.new_full((length, *tensor.shape[1:]), torch.nan)
    padded[: len(tensor)] = tensor
    return padded
