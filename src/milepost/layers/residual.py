"""Residual streams other than one sum, and the modules between them and a part.

With attention residuals, each part reads a mixture of the embedding and of the sums of blocks of
layers, instead of the sum of all of them (arXiv 2603.15031). The stream is a row of sources
for each token: the embedding, one sum for each block of layers that is over, and that of the
present block. With hyper-connections there are several streams, which are mixed for each part.

Legend: T tokens, S sources or streams, C hidden size, P split-K partials, R low rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.kernels import residual
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import cast, in_blocks
from milepost.layers.context import Context
from milepost.layers.linear import Begun, Linear
from milepost.layers.norm import RMSNorm, over_ranks, place_scale
from milepost.layers.parameters import ModuleScope, ParameterModule, module_list
from milepost.layers.parts import Numbers, Part, add_up, partials, run_parts
from milepost.layers.weight_slots import place_whole


class ResidualAttention(ParameterModule):
    """The mixture that a part reads, and its norm; stands in a block in place of the norm. A part's
    output is a source of its own if the block of layers `opens` with it; else it is added to the
    last one. The tensors are `scope.path`'s `{name}_proj.weight` and `{name}_norm_weight`."""

    def __init__(
        self, norm: RMSNorm, scope: ModuleScope, name: str, *, opens: bool = False
    ) -> None:
        super().__init__(scope)
        self.norm, self.opens = norm, opens
        size = len(norm.scale)
        self.scale = self.declare(f"{name}_norm_weight", scope.empty_precise(size))
        self.query = self.declare(
            f"{name}_proj.weight",
            scope.empty_precise(size),
            place=lambda query: place_whole(query[None]),
            dummy=lambda query, spread, generator: query.normal_(std=spread, generator=generator),
        )
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


class HyperConnection(ParameterModule):
    """Mixes the streams for a part, and says how much of its output each of them gets. The one
    after the last layer (`is_last`) only mixes; it stands where other models have a norm."""

    def __init__(
        self,
        hidden_size: int,
        num_streams: int,
        rank: int,
        scope: ModuleScope,
        *,
        eps: float,
        is_last: bool = False,
    ) -> None:
        super().__init__(scope)
        self.eps, self.rank, self.ranks = eps, rank, scope.ranks
        size = num_streams * hidden_size
        self.scale = self.declare(
            "hc_norm.weight",
            scope.empty_precise(num_streams, hidden_size),
            place=lambda scale: place_scale(scale.view(-1), 1.0),
        )
        sections = [("input_mix_weight_down", rank)]
        if not is_last:
            sections.append(("block_inject_weight", num_streams))
        self.down = Linear(size, sections, scope)
        self.up = Linear(rank, (("input_mix_weight_up", size),), scope)

    def open(self, hidden: Tensor) -> Tensor:
        """Returns the streams [T, S, C]; `hidden` may be the embedding [T, C], which they all begin
        as."""
        num_streams = len(self.scale)
        return hidden if hidden.dim() == 3 else hidden[:, None].expand(-1, num_streams, -1)

    def mix(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a part's input [T, C], and logits [T, S] of the share of its output that each
        stream gets; after the last layer there are no logits: [T, 0]."""
        num_streams = len(self.scale)
        normed = residual.norm_streams(streams, self.scale, self.eps)
        both = self.down(normed.flatten(1)) / num_streams
        low, shares = both[:, : self.rank], both[:, self.rank :]
        return residual.mix_streams(normed, self.up(F.silu(low))), shares

    def add(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        *,
        emit: Emit = Emit.VALUES,  # noqa: ARG002
        begun: Begun | None = None,  # noqa: ARG002
        order: SumOrder = SumOrder.FREE,  # noqa: ARG002
    ) -> tuple[Tensor, Inputs]:
        """Mixes the streams after the last layer, whose output they have: see `StreamNorm`."""
        assert delta is None, "blocks add their outputs themselves"
        streams = self.open(hidden)
        return streams, self.mix(streams)[0]


class HyperBlock(nn.Module):
    """One part between the residual streams; a `LayerBlock`."""

    def __init__(self, part: Part, connection: HyperConnection) -> None:
        super().__init__()
        self.parts: Sequence[Part] = module_list([part])
        self.connection = connection

    def run(
        self, hidden: Tensor, delta: Tensor | None, ctx: Context, numbers: Numbers, *, ends: bool
    ) -> tuple[Tensor, None]:
        """Returns the streams [T, S, C] with the part's output. See `LayerBlock`."""
        assert delta is None, "blocks add their outputs themselves"
        streams = self.connection.open(hidden)
        rows, shares = self.connection.mix(streams)
        output = run_parts(self.parts, rows, ctx, numbers, ends=ends)
        output = over_ranks(partials(output), self.connection.ranks)
        if ends:
            streams, shares = streams[ctx.step.last_tokens], shares[ctx.step.last_tokens]
        return residual.inject(streams, output, shares), None
