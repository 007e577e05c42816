"""Gated grouped-query attention: norms on query and key heads, partial rotary positions, a sigmoid
output gate.

Legend: T tokens (the first D decode), C hidden size, H query heads, G KV heads, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.kernels import attention
from milepost.layers.context import AttentionSpec, BatchContext, DeviceBatch
from milepost.layers.layout import BatchLayout
from milepost.layers.linear import Linear
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ParameterKind, Placement, Placements, fill_matrix, under
from milepost.layers.rotary import turn


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShapes:
    """Sizes of an attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    bias: bool


class GatedAttention(nn.Module):
    """`hidden` [T, C] in and out; writes the KV of the context's tokens to this layer's pages
    first.

    One projection gives, heads side by side: queries, keys, values, output gates. Queries and keys
    stand next to each other, so both are normed and turned at once.
    """

    def __init__(self, index: int, shapes: AttentionShapes, kind: ParameterKind) -> None:
        super().__init__()
        self.index = index
        self.shapes = shapes
        heads = (shapes.num_heads, shapes.num_kv_heads)
        sizes = (heads[0] * shapes.head_dim, heads[1] * shapes.head_dim)
        self.sizes = (sizes[0] + sizes[1], sizes[1], sizes[0])
        self.qkv_gate = Linear(shapes.hidden_size, sum(self.sizes), kind, bias=shapes.bias)
        self.out = Linear(sizes[0], shapes.hidden_size, kind, bias=shapes.bias)
        self.norm = RMSNorm(shapes.head_dim, shapes.norm_eps, kind, heads=heads)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(num_kv_heads=self.shapes.num_kv_heads, head_dim=self.shapes.head_dim)

    def forward(
        self, hidden: Tensor, ctx: BatchContext | DeviceBatch, layout: BatchLayout
    ) -> Tensor:
        if isinstance(ctx, DeviceBatch):
            projected = self.qkv_gate(hidden, lets_next_start=ctx.decodes)
            return self.out.parts(self._fused(projected, ctx, layout))
        shapes, pool = self.shapes, ctx.kv[self.index]
        query_key, value, gate = self.qkv_gate(hidden).split(self.sizes, -1)
        query_key = self.norm(query_key.unflatten(-1, (-1, shapes.head_dim)))
        query_key = turn(query_key, layout.cosines, layout.sines)
        query, key = query_key.split((shapes.num_heads, shapes.num_kv_heads), 1)
        value = value.unflatten(-1, (-1, shapes.head_dim))
        attention.store(pool, key, value, ctx.kv_write_tokens, ctx.kv_write_rows)
        attended = self._attend(query, pool, ctx.num_decodes, layout)
        return self.out(attended.flatten(1).mul_(gate.sigmoid()))

    def _fused(self, projected: Tensor, batch: DeviceBatch, layout: BatchLayout) -> Tensor:
        """The same on a GPU, between the projections: [T, N] to [T, H * E]."""
        pool, scale = batch.kv[self.index], self.shapes.head_dim**-0.5
        query = attention.prepare(
            projected,
            self.norm.scale,
            self.norm.eps,
            layout.cosines,
            layout.sines,
            pool,
            batch.step.kv_rows,
        )
        gate = projected[:, -self.sizes[2] :]
        return attention.attend(query, gate, pool, batch.tables, batch.step.attention, scale)

    def _attend(self, query: Tensor, pool: Tensor, num_decodes: int, layout: BatchLayout) -> Tensor:
        parts, scale = [], self.shapes.head_dim**-0.5
        if layout.decode_pages is not None:
            parts.append(attention.decode(query[:num_decodes], pool, layout.decode_pages, scale))
        if layout.prefill_pages:
            parts.append(attention.prefill(query[num_decodes:], pool, layout.prefill_pages, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def placements(self) -> Placements:
        query_size, kv_size = self.sizes[2], self.sizes[1]
        return {
            **under("q_proj", self._query_and_gate()),
            **under("k_proj", self.qkv_gate.placements(query_size, kv_size)),
            **under("v_proj", self.qkv_gate.placements(query_size + kv_size, kv_size)),
            **under("o_proj", self.out.placements()),
            **under("q_norm", self.norm.placements(0)),
            **under("k_norm", self.norm.placements(1)),
        }

    def _query_and_gate(self) -> Placements:
        """Checkpoints alternate, head by head, E rows of the query and E rows of its gate."""
        num_heads, head_dim = self.shapes.num_heads, self.shapes.head_dim
        size = num_heads * head_dim

        def place(parameter: Tensor) -> Placement:
            def store(values: Tensor) -> None:
                pairs = values.unflatten(0, (num_heads, 2, head_dim))
                parameter[:size].copy_(pairs[:, 0].flatten(0, 1))
                parameter[-size:].copy_(pairs[:, 1].flatten(0, 1))

            return Placement((2 * size, *parameter.shape[1:]), store)

        linear = self.qkv_gate
        placements = {"weight": place(linear.weight)}
        if linear.bias is not None:
            placements["bias"] = place(linear.bias)
        return placements

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for linear in (self.qkv_gate, self.out):
            fill_matrix(linear.weight, spread, generator)
            if linear.bias is not None:
                linear.bias.zero_()
        self.norm.fill()
