"""The indexer of an attention layer: small queries and keys by which a token selects the blocks of
tokens that it attends to. See `kernels.attention.indexed`.

Legend: T tokens, n tokens of a sequence, B whole blocks, I index heads, K entries of an index key,
O rotated entries of K.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from milepost.errors import ConfigError
from milepost.kernels.attention import AttentionRows, IndexedTokens, PagedKV, indexed
from milepost.kernels.attention.indexed import Selection
from milepost.kernels.attention.reference import turn
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.layers.linear import Linear
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShapes:
    """Sizes of an indexer, which has one key head."""

    num_heads: int
    head_dim: int
    ratio: int
    """Number of tokens in a block."""
    budget: int
    """Largest number of tokens in the blocks that a token selects."""


class Indexer(nn.Module):
    """Makes a step's index queries, and writes its index keys to the layer's pages; each rank has
    all of it."""

    def __init__(
        self, shapes: IndexerShapes, hidden_size: int, scope: ModuleScope, eps: float
    ) -> None:
        super().__init__()
        if scope.order.is_fixed:
            raise ConfigError(
                f"batch_invariant: {scope.path} selects what is attended to, which is not supported"
            )
        self.shapes, size = shapes, shapes.head_dim
        sections = (("index_qk_proj", (shapes.num_heads + 1) * size),)
        self.projection = Linear(hidden_size, sections, scope)
        self.query_norm, self.key_norm = (
            RMSNorm(size, eps, scope.under(f"{letter}_layernorm"), offset=1.0) for letter in "qk"
        )

    @property
    def reads(self) -> Emit:
        """The form of rows that it reads."""
        return self.projection.reads

    def select(
        self,
        rows: Inputs,
        kv: PagedKV,
        layout: AttentionRows | IndexedTokens,
        kv_rows: Tensor,
        rotary: Rotary,
        angles: tuple[Tensor, Tensor],
    ) -> Selection:
        """Writes index keys to the step's `kv_rows`. Returns the data by which its tokens select
        blocks. `angles` are those of their positions."""
        shapes = self.shapes
        queries, keys = self.projection(rows).split(
            (shapes.num_heads * shapes.head_dim, shapes.head_dim), -1
        )
        indexed.store(kv, keys, layout, kv_rows)
        queries = self.query_norm(queries.unflatten(-1, (-1, shapes.head_dim)))
        return Selection(
            query=turn(queries, *angles),
            norm_scale=self.key_norm.scale,
            eps=self.key_norm.eps,
            angles=lambda positions: rotary.angles(positions, keys.dtype),
            num_turned=2 * angles[0].shape[-1],
            ratio=shapes.ratio,
            budget=shapes.budget,
        )
