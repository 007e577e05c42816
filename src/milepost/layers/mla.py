"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; without positions Kimi Linear, arXiv
2510.26692): pages hold one latent per token, and every head derives its keys and values from it.

Legend: T tokens, C hidden size, H heads, N entries of a key derived from the latent, P entries
shared by all heads, R latent size, V value_dim, S split-K partials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from milepost.kernels import attention
from milepost.kernels.attention import (
    AttentionLayout,
    LatentOperation,
    PagedKV,
    TurnedEntries,
)
from milepost.kernels.layout.emit import Emit, Inputs, values_of
from milepost.kernels.products import Epilogue, multiply_heads
from milepost.kernels.products.forms.quantised import Quantised
from milepost.layers.context import AttentionSpec, Context
from milepost.layers.kv_scales import KVScales
from milepost.layers.linear import Linear
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope, ParameterModule
from milepost.layers.rotary import Rotary
from milepost.layers.weight_slots import (
    WeightSlot,
    WeightSlots,
    cut_all,
    cut_outputs,
    fill_matrix,
)
from milepost.layers.weights import RawPrecision
from milepost.parallel import Cut

_NORM_EPS = 1e-6
"""Epsilon of the latents' norm, regardless of the model's epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShapes:
    """Sizes of a latent attention layer."""

    hidden_size: int
    num_heads: int
    latent_dim: int
    own_dim: int
    """Entries of a head's key that are derived from the latent."""
    shared_dim: int
    """Entries of a key that all heads share."""
    value_dim: int
    query_rank: int = 0
    """Size of the latent that queries are derived from; 0 if they are not."""
    has_gate: bool = False
    """Whether each head has an output gate: one number, the sigmoid of a projection."""

    @property
    def key_dim(self) -> int:
        return self.own_dim + self.shared_dim


class MLA(ParameterModule):
    """Latent attention from `hidden` [T, C] to the output [T, C]; a `Part`. Writes the latents of
    the step's tokens to their pages first.

    The matrices that would expand latents to keys and values are applied to queries and outputs
    instead. Each rank has a share of the heads and all of the latents. A rotary embedding turns the
    shared entries, in pairs of neighbours.
    """

    def __init__(
        self,
        shapes: MLAShapes,
        scope: ModuleScope,
        *,
        rotary: Rotary | None = None,
        out: str = "o_proj",
        first_row: int = 0,
    ) -> None:
        super().__init__(scope)
        self.rotary = rotary
        self.cut = scope.ranks.share(shapes.num_heads, f"{scope.path} num_attention_heads")
        shapes = self.shapes = replace(shapes, num_heads=self.cut.size)
        heads, latent, rank = shapes.num_heads, shapes.latent_dim, shapes.query_rank
        self.sizes = rank or heads * shapes.key_dim, latent + shapes.shared_dim
        names = "q_a_proj" if rank else "q_proj", "kv_a_proj_with_mqa"
        sections: list[tuple[str | None, int]] = [*zip(names, self.sizes, strict=True)]
        if shapes.has_gate:
            sections += [("g_proj", heads), (None, -heads % 8)]
        query_cut = self.cut.times(shapes.key_dim)
        cuts = {"q_proj": query_cut, "g_proj": self.cut}
        self.projection = Linear(
            shapes.hidden_size, [each for each in sections if each[1]], scope, cuts=cuts
        )
        self.query_norm = self.query = None
        if rank:
            self.query_norm = RMSNorm(rank, _NORM_EPS, scope.under("q_a_layernorm"))
            query_sections = (("q_b_proj", heads * shapes.key_dim),)
            self.query = Linear(rank, query_sections, scope, cuts={"q_b_proj": query_cut})
        self.norm_weight = self.declare("kv_a_layernorm.weight", scope.empty_precise(latent))
        self.up_key = scope.empty(heads, shapes.own_dim, latent)
        self.up_value = scope.empty(heads, shapes.value_dim, latent)
        inputs = self.cut.times(shapes.value_dim)
        self.out = Linear(
            heads * shapes.value_dim, ((out, shapes.hidden_size),), scope, inputs=inputs
        )
        self.kv_scales = KVScales(1, scope)
        self.operation = LatentOperation(
            num_heads=heads,
            latent_dim=latent,
            shared_dim=shapes.shared_dim,
            value_bytes=scope.dtype.itemsize,
            first_row=first_row,
            order=scope.order,
        )

    @property
    def spec(self) -> AttentionSpec:
        size = self.shapes.latent_dim + self.shapes.shared_dim
        return AttentionSpec(num_kv_heads=1, head_dim=size, rows_each=1)

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, S, C] of it."""
        shapes, layout = self.shapes, ctx.step.layouts[self.operation]
        query_part, shared, kv, gate = self._prepare(rows, ctx, number, layout)
        order = self.scope.order
        query = multiply_heads(query_part, self.up_key, order=order)
        scale = shapes.key_dim**-0.5
        attended = values_of(attention.attend(query, None, kv, layout, scale, shared_query=shared))
        output = multiply_heads(attended.view(query.shape), self.up_value.mT, gate, order=order)
        return self.out(output.flatten(1), epilogue=Epilogue.PARTIALS)

    def store(self, rows: Inputs, ctx: Context, number: int) -> None:
        """Writes the latents of the step's tokens and computes nothing else; tokens are laid out as
        for the model's layers."""
        self._prepare(rows, ctx, number, ctx.step.layouts[replace(self.operation, first_row=0)])

    def _prepare(
        self, rows: Inputs, ctx: Context, number: int, layout: AttentionLayout
    ) -> tuple[Tensor, Tensor, PagedKV, Tensor | None]:
        """Writes latents; returns queries' own entries [T, H, N] and shared ones [T, H, P], the
        pages, and gates [T, H] before their sigmoid."""
        shapes, begin = self.shapes, sum(self.sizes)
        projected = self.projection(rows, launch_dependents=ctx.decodes)
        queries, latents = projected[:, :begin].split(self.sizes, -1)
        if self.query_norm is not None and self.query is not None:
            queries = self.query(self.query_norm.add(queries, None)[1])
        by_head = queries.unflatten(-1, (shapes.num_heads, -1))
        query_part, shared = by_head.split((shapes.own_dim, shapes.shared_dim), -1)
        turned = None
        if self.rotary is not None:
            turned = TurnedEntries(*ctx.angles[self.rotary], shared)
        # A latent serves as key and value, and uses the keys' scale.
        kv = PagedKV(ctx.kv[number], ctx.tables, self.kv_scales.values[0])
        how = self.norm_weight, _NORM_EPS, kv, ctx.step.kv_rows, layout, turned
        attention.store_latents(latents, *how)
        gate = projected[:, begin : begin + shapes.num_heads] if shapes.has_gate else None
        return query_part, shared, kv, gate

    def placements(self) -> WeightSlots:
        """Places tensors. The checkpoint's `kv_b_proj` holds, head by head, the rows of its key and
        then of its value."""
        shapes = self.shapes
        sizes = shapes.own_dim, shapes.value_dim

        def store(values: Tensor) -> None:
            by_head = values.unflatten(0, (shapes.num_heads, -1))
            for parameter, part in zip(
                (self.up_key, self.up_value), by_head.split(sizes, 1), strict=True
            ):
                parameter.copy_(part)

        name, shape = "kv_b_proj", (shapes.num_heads * sum(sizes), shapes.latent_dim)
        parts = place_expanded(name, shape, self.scope, self.cut.times(sum(sizes)), store)
        expanded = {self.scope.full(f"{name}.{part}"): place for part, place in parts.items()}
        return super().placements() | expanded

    def fill(self, spread: float, generator: torch.Generator) -> None:
        super().fill(spread, generator)
        fill_matrix(self.up_key, spread, generator)
        fill_matrix(self.up_value, spread, generator)


def place_expanded(
    name: str,
    shape: tuple[int, int],
    scope: ModuleScope,
    cut: Cut,
    store: Callable[[Tensor], object],
) -> WeightSlots:
    """Returns placements for the tensors of a projection that is kept in the model's dtype, since
    other matrices are computed from it, keyed by their names within it. `store` gets its weight
    [O, I] once all of them are there; O are the outputs that `cut` keeps."""
    precision = scope.precision(name)
    if isinstance(precision, RawPrecision):
        return {"weight": cut_all(WeightSlot(shape, store), cut)}
    path = scope.full(name)
    matrix = precision.matrix(*shape, scope)
    tensors = matrix.place(torch.arange(shape[0]), path)
    cut_outputs(tensors, matrix.axes, cut, path)
    missing = set(tensors)

    def note(part: str, place: WeightSlot, values: Tensor) -> None:
        place.store(values)
        missing.discard(part)
        if not missing:
            form = matrix.form
            assert isinstance(form, Quantised), f"{path} is raw or quantised"
            store(form.dequantise(scope.dtype))

    return {
        part: replace(place, store=partial(note, part, place)) for part, place in tensors.items()
    }
