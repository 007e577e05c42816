"""Paged attention's kernels beside their reference: what the tests on CPU and GPU share.

Legend: T tokens, S sequences, H query heads, G KV heads, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.attention import PagedKV, pages, reference, table
from milepost.kernels.attention import items as work
from milepost.kernels.attention.tiles import NARROW_ROWS, ItemShapes
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import FP8, round_fp8
from tests.batches import Part, build_batch, build_pages

POISON = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences of a step. The first `num_sharing` tokens of all stand in the same pages. Of pages
    behind their windows tables have none."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 64
    num_sharing: int = 0
    has_gate: bool = True
    gates_heads: bool = False
    """Each head has one gate."""
    dtype: torch.dtype = torch.float32
    has_float8: bool = False
    """KV is kept in it."""
    max_dequantised: int = 0
    wide_rows: int = 128
    num_programs: int = 16
    num_drafts: int = 0
    least_rows: int = NARROW_ROWS
    capacity: Capacity | None = None
    window: int | None = None
    order: SumOrder = SumOrder.FREE


class Step:
    """One step's tensors. Rows past the ends of sequences, between pages and of no page of theirs
    hold NaN."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 0) -> None:
        self.case = case
        random = torch.Generator(device).manual_seed(seed)
        self.num_tokens = sum(case.lengths)
        padded = case.capacity.num_tokens if case.capacity else self.num_tokens
        options = {"generator": random, "device": device}
        heads = case.num_heads + case.num_kv_heads
        size = case.head_dim * (heads + case.num_kv_heads + case.num_heads)
        projected = torch.randn(padded, size, **options).to(case.dtype)
        num_gates = case.num_heads * (1 if case.gates_heads else case.head_dim)
        self.gate = projected[:, -num_gates:] if case.has_gate else None
        self.query = projected[:, : case.num_heads * case.head_dim].unflatten(
            1, (case.num_heads, case.head_dim)
        )
        self.tables = self._take_pages(seed)
        self.rows = np.arange(len(case.starts))[::-1] + 1
        num_pages = int(self.tables.max()) + 3
        shape = (case.num_kv_heads, case.head_dim)
        dtype = FP8 if case.has_float8 else case.dtype
        self.pool = build_pages(num_pages, case.page_size, *shape, dtype, device)
        self.kv_scales = None
        if case.has_float8:
            self.kv_scales = 0.01 + torch.rand(2, case.num_kv_heads, **options)
        for row, start, length in zip(self.rows, case.starts, case.lengths, strict=True):
            places = np.arange(self._first(start), start + length)
            page_ids = torch.from_numpy(self.tables[row, places // case.page_size]).long()
            offsets = torch.from_numpy(places % case.page_size)
            new = torch.randn(len(places), 2, *shape, **options).to(case.dtype)
            if self.kv_scales is not None:
                new = round_fp8(new / self.kv_scales[..., None])
            pool, new = pages.as_bytes(self.pool), pages.as_bytes(new)
            pool[page_ids.to(device), :, offsets.to(device)] = new
        self.device = device

    def _take_pages(self, seed: int) -> np.ndarray:
        case = self.case
        random = np.random.default_rng(seed)
        needed = [
            -(-(s + n) // case.page_size) for s, n in zip(case.starts, case.lengths, strict=True)
        ]
        ids = iter(random.permutation(sum(needed) + 5) + 1)
        # Row 0 is nobody's; entries past a table's end name pages that do not exist.
        tables = np.full((len(needed) + 1, max(needed) + 2), 10**6, np.int32)
        shared = [next(ids) for _ in range(case.num_sharing // case.page_size)]
        for row, count in zip(range(len(needed), 0, -1), needed, strict=True):
            own = [next(ids) for _ in range(count - len(shared))]
            tables[row, :count] = [*shared, *own]
            start = case.starts[len(needed) - row]
            tables[row, : self._first(start) // case.page_size] = 10**6
        tables[tables == 10**6] = -(10**6)
        return tables

    def _first(self, start: int) -> int:
        """Position of the first KV that tokens from `start` on read."""
        return 0 if self.case.window is None else max(start + 1 - self.case.window, 0)

    def items(self, *, share: bool = True) -> work.AttentionItems:
        case = self.case
        group = case.num_heads // case.num_kv_heads
        tiling = work.Tiling(
            heads_per_kv=group,
            num_kv_heads=case.num_kv_heads,
            page_size=case.page_size,
            capacity=case.capacity,
            shapes=ItemShapes(
                narrow_rows=table.narrow_rows(group, 1 + case.num_drafts, case.least_rows),
                wide_rows=case.wide_rows,
                num_beside=3 if case.has_float8 else 1,
            ),
            tokens_each=1 + case.num_drafts,
            num_programs=case.num_programs,
            max_dequantised=case.max_dequantised,
            window=case.window,
            order=case.order,
        )
        tables = self.tables if share else None
        return work.lay_out(case.starts, case.lengths, self.rows, tiling, tables)

    def on_device(self, items: work.AttentionItems) -> work.AttentionItems:
        arrays = {
            name: torch.from_numpy(getattr(items, name)).to(self.device)
            for name in ("narrow", "wide", "bases", "dequantised")
        }
        return replace(items, **arrays)

    def kv(self) -> PagedKV:
        """The pages on the device."""
        tables = torch.from_numpy(self.tables).to(self.device)
        return PagedKV(self.pool, tables, self.kv_scales)

    def expected(self) -> Tensor:
        """[T, H * E] by the reference, in float32 at least."""
        case = self.case
        sequences = zip(self.rows, case.starts, case.lengths, strict=True)
        parts = [
            Part(
                pages=self.tables[row, : -(-(start + length) // case.page_size)].tolist(),
                start=start,
                length=length,
                slot_in=0,
                slot_out=1,
            )
            for row, start, length in sequences
            if length
        ]
        wide = torch.promote_types(case.dtype, torch.float32)
        pool = self.pool if case.has_float8 else self.pool.to(wide)
        batch = build_batch(parts, case.page_size, pages.rows_per_page(pool))
        laid_out = pages.lay_out(replace(batch, device=pool.device), 0, case.window).prefills
        query = self.query[: self.num_tokens].to(wide)
        scale = case.head_dim**-0.5
        attended = reference.prefill(
            query, PagedKV(pool, scales=self.kv_scales), laid_out, scale
        ).flatten(1)
        if self.gate is None:
            return attended
        gate = self.gate[: self.num_tokens].to(wide).sigmoid()
        return attended * gate.repeat_interleave(attended.shape[1] // gate.shape[1], 1)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A layer's projected tokens and what `prepare` needs besides them."""

    projected: Tensor
    norm_scale: Tensor | None
    angles: tuple[Tensor, Tensor] | None
    pool: Tensor
    kv_rows: Tensor
    num_heads: int
    kv_scales: Tensor | None = None
    eps: float = 1e-6

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.pool, scales=self.kv_scales)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Queries and the pool afterwards, by the layer's own composition in float32."""
        _, _, _, num_kv_heads, head_dim = self.pool.shape
        heads = self.projected.unflatten(1, (-1, head_dim)).float()
        num_moved = self.num_heads + num_kv_heads
        moved = heads[:, :num_moved]
        if self.norm_scale is not None:
            moved = F.rms_norm(moved, (head_dim,), eps=self.eps) * self.norm_scale
        if self.angles is not None:
            cosines, sines = (each.float() for each in self.angles)
            half = cosines.shape[-1]
            first, second, rest = moved.split((half, half, head_dim - 2 * half), -1)
            turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
            moved = torch.cat(turned, -1)
        query, key = moved.split((self.num_heads, num_kv_heads), 1)
        value = heads[:, num_moved:][:, :num_kv_heads]
        pool = _copy(self.pool)
        tokens = (self.kv_rows >= 0).nonzero()[:, 0]
        if pool.dtype == FP8:  # the numbers that are rounded to it are the layer's, not float32
            key, value = key.to(self.projected.dtype), value.to(self.projected.dtype)
        kv = PagedKV(pool, scales=self.kv_scales)
        reference.store(kv, key, value, tokens, self.kv_rows[tokens])
        return query, pool


def _copy(pool: Tensor) -> Tensor:
    """In float32 unless it is float8, with as much between the pages."""
    num_pages, _, *page = pool.shape
    dtype = FP8 if pool.dtype == FP8 else torch.float32
    copy = build_pages(num_pages, *page, dtype, str(pool.device))
    return copy.copy_(pool)


def build_projection(
    num_tokens: int,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    half: int = 4,
    has_norms: bool = True,
    has_float8: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Projection:
    random = torch.Generator(device).manual_seed(0)
    options = {"generator": random, "device": device}
    columns = (2 * num_heads + 2 * num_kv_heads) * head_dim
    angles = 100 * torch.rand(num_tokens, 1, half, **options)
    num_pages = num_tokens // 64 + 2
    kept = FP8 if has_float8 else dtype
    pool = build_pages(num_pages, 64, num_kv_heads, head_dim, kept, device)
    places = torch.randperm(64 * num_pages, **options)[:num_tokens]
    kv_rows = places // 64 * pages.rows_per_page(pool) + places % 64
    kv_rows[::5] = -1
    norm_scale = 1 + 0.1 * torch.randn(num_heads + num_kv_heads, head_dim, **options)
    return Projection(
        projected=3 * torch.randn(num_tokens, columns, **options).to(dtype),
        norm_scale=norm_scale if has_norms else None,
        angles=(angles.cos().to(dtype), angles.sin().to(dtype)) if half else None,
        pool=pool,
        kv_rows=kv_rows,
        num_heads=num_heads,
        kv_scales=0.01 + torch.rand(2, num_kv_heads, **options) if has_float8 else None,
    )
