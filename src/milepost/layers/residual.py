"""Attention residuals: each part reads a mixture of the embedding and of what blocks of layers have
added up, instead of the sum of all of them (arXiv 2603.15031).

The residual stream is a row of sources for each token: the embedding, one sum for each block of
layers that is over, and that of the present block.

Legend: T tokens, S sources, C hidden size, P split-K partials.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from milepost.kernels import residual
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import cast, in_blocks
from milepost.layers.linear import Begun
from milepost.layers.norm import RMSNorm, over_ranks
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import add_up
from milepost.layers.weight_slots import WeightSlots, place_whole


class ResidualAttention(nn.Module):
    """The mixture that a part reads, and its norm; stands in a block in place of the norm. A part's
    output is a source of its own if the block of layers `opens` with it; else it is added to the
    last one. The tensors are `scope.path`'s `{name}_proj.weight` and `{name}_norm_weight`."""

    def __init__(
        self, norm: RMSNorm, scope: ModuleScope, name: str, *, opens: bool = False
    ) -> None:
        super().__init__()
        self.norm, self.scope, self.name, self.opens = norm, scope, name, opens
        size = len(norm.scale)
        self.scale, self.query = scope.empty_precise(size), scope.empty_precise(size)
        self.ranks = norm.ranks

    def add(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        *,
        emit: Emit = Emit.VALUES,
        begun: Begun | None = None,
        order: SumOrder = SumOrder.FREE,
    ) -> tuple[Tensor, Inputs]:
        """Takes in `delta`, the output of the part before, as `RMSNorm.add` does. `hidden` is the
        stream [T, S, C], or the embedding [T, C]. Returns the stream and the normed mixture."""
        sources = hidden if hidden.dim() == 3 else hidden[:, None]
        delta = None if delta is None else over_ranks(delta, self.ranks)
        if delta is not None and self.opens:
            whole = cast(add_up(delta), sources.dtype)
            sources = torch.cat((sources, whole[:, None]), 1)
            delta = None
        mixed = self._mix(sources, delta)
        return sources, self.norm.add(mixed, None, emit=emit, begun=begun, order=order)[1]

    def _mix(self, sources: Tensor, delta: Tensor | None) -> Tensor:
        how = self.scale, self.query, self.norm.eps
        if not self.scope.order.is_fixed or runs_triton(sources):
            return residual.mix(sources, delta, *how)
        if delta is not None:
            sources[:, -1] += add_up(delta)
        return in_blocks(lambda rows: residual.mix(rows, None, *how), sources)

    def placements(self) -> WeightSlots:
        return {
            self.scope.full(f"{self.name}_proj.weight"): place_whole(self.query[None]),
            self.scope.full(f"{self.name}_norm_weight"): place_whole(self.scale),
        }

    def fill(self, spread: float, generator: torch.Generator) -> None:
        self.query.normal_(std=spread, generator=generator)
        self.scale.fill_(1)
