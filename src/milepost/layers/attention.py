"""Grouped-query attention: optional norms on query and key heads, optional rotary positions, an
optional sigmoid output gate, an optional sliding window or indexer.

Legend: T tokens, C hidden size, H query heads, G KV heads, E head_dim, P split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.kernels import attention
from milepost.kernels.attention import (
    AttentionLayout,
    AttentionOperation,
    AttentionRows,
    IndexedTokens,
    PagedKV,
    Selection,
)
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.products import Epilogue
from milepost.layers.context import AttentionSpec, Context
from milepost.layers.indexer import Indexer
from milepost.layers.kv_scales import KVScales
from milepost.layers.linear import Linear
from milepost.layers.norm import HeadNorms, NormedPart, norm_over_ranks
from milepost.layers.parameters import ModuleScope
from milepost.layers.rotary import Rotary

GateScope = Literal["entries", "heads", "none"]
"""How the output is multiplied by sigmoids of gates: each entry by its own, each head by one, or
not at all."""
HeadNormScope = Literal["each", "whole", "none"]
"""How query and key heads are normed: each head by itself, all query heads as one and all key heads
as one, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShapes:
    """Sizes and options of an attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    norm: HeadNormScope = "none"
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    gate: GateScope = "none"
    """Checkpoints store gates of entries after the head's query, in one projection; those of heads
    in one of their own."""
    scale: float | None = None
    """Scale of the scores; head_dim ** -0.5 by default."""
    first_row: int = 0
    """The first position that is attended to; KV before it is ignored."""
    window: int | None = None
    """Tokens that a token attends to, itself the last; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """Names of the tensors that checkpoints of different families call differently."""

    out: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"


class Attention(nn.Module):
    """Grouped-query attention from `hidden` [T, C] to the output [T, C]; a `Part`. Writes the KV of
    the step's tokens to its pages first.

    One projection computes, heads side by side: queries, keys, values, output gates. Queries and
    keys are adjacent, so both are normed and rotated at once. Each rank has a share of the heads;
    if there are fewer KV heads than ranks, each rank has the one that its query heads read.
    """

    def __init__(
        self,
        shapes: AttentionShapes,
        scope: ModuleScope,
        *,
        rotary: Rotary | None,
        names: AttentionNames = AttentionNames(),
        indexer: Indexer | None = None,
    ) -> None:
        super().__init__()
        heads = scope.ranks.share(shapes.num_heads, f"{scope.path} num_attention_heads")
        kv_heads = scope.ranks.share_few(shapes.num_kv_heads, f"{scope.path} num_key_value_heads")
        shapes = replace(shapes, num_heads=heads.size, num_kv_heads=kv_heads.size)
        self.shapes, self.rotary, self.indexer = shapes, rotary, indexer
        self._order = scope.order
        num_heads, num_kv_heads, head_dim = heads.size, kv_heads.size, shapes.head_dim
        query, kv = num_heads * head_dim, num_kv_heads * head_dim
        sections, orders = [("q_proj", query), ("k_proj", kv), ("v_proj", kv)], {}
        if shapes.gate == "heads":
            sections.append(("gate_proj", num_heads))
        if shapes.gate == "entries":
            sections.append(("q_proj", query))
            # The checkpoint stores E rows of the query and E rows of its gate, head by head.
            pairs = torch.arange(2 * query).view(2, num_heads, head_dim).transpose(0, 1)
            orders["q_proj"] = pairs.flatten()
        inputs, kv_rows = heads.times(head_dim), kv_heads.times(head_dim)
        cuts = {
            "q_proj": heads.times((1 + (shapes.gate == "entries")) * head_dim),
            "k_proj": kv_rows,
            "v_proj": kv_rows,
            "gate_proj": heads,
        }
        self.qkv_gate = Linear(
            shapes.hidden_size, sections, scope, bias=shapes.bias, orders=orders, cuts=cuts
        )
        self.out = Linear(
            query, ((names.out, shapes.hidden_size),), scope, bias=shapes.bias, inputs=inputs
        )
        self.kv_scales = KVScales(num_kv_heads, scope)
        self.gate_size = {"entries": query, "heads": num_heads, "none": 0}[shapes.gate]
        self.norms = None
        if shapes.norm != "none":
            self.norms = HeadNorms(
                {names.query_norm: heads, names.key_norm: kv_heads},
                head_dim,
                scope,
                offset=shapes.norm_offset,
                is_whole=shapes.norm == "whole",
            )

    @property
    def spec(self) -> AttentionSpec:
        shapes = self.shapes
        return AttentionSpec(
            num_kv_heads=shapes.num_kv_heads,
            head_dim=shapes.head_dim,
            rows_each=2 if self.indexer is None else 3,
            window=shapes.window,
        )

    @cached_property
    def operation(self) -> AttentionOperation:
        shapes = self.shapes
        return AttentionOperation(
            num_heads=shapes.num_heads,
            num_kv_heads=shapes.num_kv_heads,
            head_dim=shapes.head_dim,
            first_row=shapes.first_row,
            window=shapes.window,
            is_indexed=self.indexer is not None,
            order=self._order,
        )

    @cached_property
    def ending(self) -> AttentionOperation:
        """The operation whose layout `run_last_tokens` needs too."""
        return replace(self.operation, last_tokens_only=True)

    @property
    def first(self) -> Linear | None:
        """The projection that the preceding norm's launch may also compute: see `Block`."""
        return None if self.qkv_gate.is_raw or self.indexer is not None else self.qkv_gate

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        readers = (self.qkv_gate, self.indexer)
        return Emit.joined(each.reads for each in readers if each is not None)

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, P, C] of it."""
        layout = ctx.step.layouts[self.operation]
        query, projected = self._prepare(rows, ctx, number, layout)
        selection = self._select(rows, ctx, number)
        return self._attend(query, self._gate(projected), ctx, number, layout, selection)

    def run_last_tokens(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output of the sampled positions only, or partials of it; writes the KV of all
        tokens."""
        step = ctx.step
        query, projected = self._prepare(rows, ctx, number, step.layouts[self.operation])
        gate = self._gate(projected)
        gate = None if gate is None else gate[step.last_tokens]
        selection = self._select(rows, ctx, number)
        selection = None if selection is None else selection.part(step.last_tokens)
        layout = step.layouts[self.ending]
        return self._attend(query[step.last_tokens], gate, ctx, number, layout, selection)

    def _select(self, rows: Inputs, ctx: Context, number: int) -> Selection | None:
        """Writes index keys. Returns the data by which tokens select what they attend to; None if
        they attend to all."""
        if self.indexer is None:
            return None
        layout = ctx.step.layouts[self.operation]
        assert isinstance(layout, AttentionRows | IndexedTokens), "layouts of an indexer"
        assert self.rotary is not None, "blocks are turned as their first tokens"
        angles = ctx.angles[self.rotary]
        places = PagedKV(ctx.kv[number]), layout, ctx.step.kv_rows
        return self.indexer.select(rows, *places, self.rotary, angles)

    def _gate(self, projected: Tensor) -> Tensor | None:
        """Returns a gate for each entry of the output [T, H * E], or for each head, if there are
        any."""
        return projected[:, -self.gate_size :] if self.gate_size else None

    def _attend(
        self,
        query: Tensor,
        gate: Tensor | None,
        ctx: Context,
        number: int,
        layout: AttentionLayout,
        selection: Selection | None = None,
    ) -> Tensor:
        shapes = self.shapes
        scale = shapes.head_dim**-0.5 if shapes.scale is None else shapes.scale
        tables = ctx.tables if shapes.window is None else ctx.window_tables
        kv = PagedKV(ctx.kv[number], tables, self.kv_scales.values)
        attended = attention.attend(query, gate, kv, layout, scale, selection=selection)
        return self.out(attended, epilogue=Epilogue.PARTIALS, order=ctx.order)

    def store(self, rows: Inputs, ctx: Context, number: int) -> None:
        """Writes the KV of the step's tokens and computes nothing else; tokens are laid out as for
        the model's layers."""
        self._prepare(rows, ctx, number, ctx.step.layouts[replace(self.operation, first_row=0)])

    def _prepare(
        self, rows: Inputs, ctx: Context, number: int, layout: AttentionLayout
    ) -> tuple[Tensor, Tensor]:
        """Writes KV; returns queries [T, H, E] and the whole projection."""
        norms = self.norms
        projected = self.qkv_gate(rows, launch_dependents=ctx.decodes, order=ctx.order)
        if norms is not None and norms.is_whole:
            self._norm_whole(projected, norms)
            norms = None
        query = attention.prepare(
            self.operation,
            projected,
            None if norms is None else norms.scale,
            self.shapes.norm_eps,
            None if self.rotary is None else ctx.angles[self.rotary],
            PagedKV(ctx.kv[number], scales=self.kv_scales.values),
            ctx.step.kv_rows if self.shapes.window is None else ctx.step.window_rows,
            layout,
        )
        return query, projected

    def _norm_whole(self, projected: Tensor, norms: HeadNorms) -> None:
        """Norms all queries as one and all keys as one, in place."""
        scope, first = norms.scope, 0
        parts = []
        for column, heads in enumerate(norms.groups.values()):
            size = heads.size * self.shapes.head_dim
            values, scale = (
                each.narrow(-1, first, size) for each in (projected, norms.scale.flatten())
            )
            parts.append(
                NormedPart(values, scale, column=column, num_features=scope.ranks.size * size)
            )
            first += size
        normed = norm_over_ranks(parts, self.shapes.norm_eps, len(parts), scope)
        for part, values in zip(parts, normed, strict=True):
            part.values.copy_(values)
