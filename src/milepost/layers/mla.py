"""Multi-head latent attention without positions (DeepSeek-V2, arXiv 2405.04434; Kimi Linear, arXiv
2510.26692): pages hold one latent per token, and every head derives its keys and values from it.

Legend: T tokens, C hidden size, H heads, N entries of a key derived from the latent, P entries
shared by all heads, R latent size, V value_dim, S split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from milepost.kernels import attention
from milepost.kernels.attention import LatentOperation, PagedKV
from milepost.kernels.layout.emit import Emit, Inputs, values_of
from milepost.kernels.products import Epilogue, multiply_heads
from milepost.layers.context import AttentionSpec, Context
from milepost.layers.kv_scales import KVScales
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope
from milepost.layers.quantised.expanded import place_expanded
from milepost.layers.weight_slots import WeightSlots, fill_matrix, place_whole

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

    @property
    def key_dim(self) -> int:
        return self.own_dim + self.shared_dim


class MLA(nn.Module):
    """Latent attention from `hidden` [T, C] to the output [T, C]; a `Part`. Writes the latents of
    the step's tokens to their pages first.

    The matrices that would expand latents to keys and values are applied to queries and outputs
    instead. Each rank has a share of the heads and all of the latents.
    """

    rotary = None

    def __init__(self, shapes: MLAShapes, kind: ModuleScope) -> None:
        super().__init__()
        self.kind = kind
        self.cut = kind.ranks.share(shapes.num_heads, f"{kind.path} num_attention_heads")
        shapes = self.shapes = replace(shapes, num_heads=self.cut.size)
        heads, latent = shapes.num_heads, shapes.latent_dim
        sections = (
            ("q_proj", heads * shapes.key_dim),
            ("kv_a_proj_with_mqa", latent + shapes.shared_dim),
        )
        cuts = {"q_proj": self.cut.times(shapes.key_dim)}
        self.projection = Linear(shapes.hidden_size, sections, kind, cuts=cuts)
        self.norm_weight = kind.empty_precise(latent)
        self.up_key = kind.empty(heads, shapes.own_dim, latent)
        self.up_value = kind.empty(heads, shapes.value_dim, latent)
        out = (("o_proj", shapes.hidden_size),)
        inputs = self.cut.times(shapes.value_dim)
        self.out = Linear(heads * shapes.value_dim, out, kind, inputs=inputs)
        self.kv_scales = KVScales(1, kind)
        self.operation = LatentOperation(
            num_heads=heads,
            latent_dim=latent,
            shared_dim=shapes.shared_dim,
            value_bytes=kind.dtype.itemsize,
            batch_invariant=kind.batch_invariant,
        )

    @property
    def spec(self) -> AttentionSpec:
        size = self.shapes.latent_dim + self.shapes.shared_dim
        return AttentionSpec(num_kv_heads=1, head_dim=size, rows_each=1)

    @property
    def reads(self) -> Emit:
        """See `Part`."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, S, C] of it."""
        shapes, layout = self.shapes, ctx.step.layouts[self.operation]
        projected = self.projection(rows, launch_dependents=ctx.decodes)
        latents = projected[:, shapes.num_heads * shapes.key_dim :]
        # A latent serves as key and value, and uses the keys' scale.
        kv = PagedKV(ctx.kv[number], ctx.tables, self.kv_scales.values[0])
        attention.store_latents(latents, self.norm_weight, _NORM_EPS, kv, ctx.step.kv_rows, layout)
        queries = projected[:, : -latents.shape[1]].unflatten(-1, (shapes.num_heads, -1))
        own, shared = queries.split((shapes.own_dim, shapes.shared_dim), -1)
        how = {"batch_invariant": self.kind.batch_invariant}
        query = multiply_heads(own, self.up_key, **how)
        scale = shapes.key_dim**-0.5
        attended = values_of(attention.attend(query, None, kv, layout, scale, shared_query=shared))
        output = multiply_heads(attended.view(query.shape), self.up_value.mT, **how)
        return self.out(output.flatten(1), epilogue=Epilogue.PARTIALS)

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
        parts = place_expanded(name, shape, self.kind, self.cut.times(sum(sizes)), store)
        tensors = {"kv_a_layernorm.weight": place_whole(self.norm_weight)}
        tensors |= {f"{name}.{part}": place for part, place in parts.items()}
        return {self.kind.full(name): place for name, place in tensors.items()}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        self.norm_weight.fill_(1)
        fill_matrix(self.up_key, spread, generator)
        fill_matrix(self.up_value, spread, generator)
