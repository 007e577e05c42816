"""The head for multi-token prediction (MTP): from a token and the model's hidden state before it,
it predicts the model's hidden state after it.

    join(x[t + 1], h[t]) = fc(concat(norm(embed(x[t + 1])), norm(h[t])))
    h'[t + 1]            = norm(layer(join))

h[t] is the model's hidden state after its last norm. The model's own head turns h' into logits;
when a draft follows a draft, h' takes the place of h. `layer` is a full-attention layer over the
joined rows so far.

The row of x[t + 1] is stored in the page of x[t + 1], one position later than in implementations
that number rows by t. So a page's content depends only on the tokens up to its end, and requests
that share the page share its rows too. The row of the first token would need a hidden state before
the text: it is written, but never read.

Legend: T tokens, V vocabulary, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.kernels import mtp
from milepost.kernels.layout.emit import values_of
from milepost.kernels.mtp import Carried, CarryOperation, CarryRows
from milepost.layers.attention import Attention
from milepost.layers.context import Context, PictureRows
from milepost.layers.embedding import embed, put
from milepost.layers.linear import Linear
from milepost.layers.mla import MLA
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, ResidualBlock

FIRST_ROW = 1
"""The first row that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """Names of a head's own tensors, if they differ from family to family."""

    norm_embedding: str = "pre_fc_norm_embedding"
    norm_hidden: str = "pre_fc_norm_hidden"
    fc: str = "fc"
    norm: str = "norm"


class MTPHead(nn.Module):
    """An MTP head with its tensors under `scope.path`; embedding and logits are the model's."""

    rotary = None

    def __init__(
        self,
        hidden_size: int,
        layer: Layer,
        scope: ModuleScope,
        *,
        eps: float,
        offset: float = 0.0,
        names: HeadNames = HeadNames(),
    ) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            return RMSNorm(hidden_size, eps, scope.under(name), offset=offset)

        self.norm_embedding, self.norm_hidden = norm(names.norm_embedding), norm(names.norm_hidden)
        self.fc = Linear(2 * hidden_size, ((names.fc, hidden_size),), scope)
        self.layer = layer
        self.norm = norm(names.norm)
        self.ranks = scope.ranks
        (mixer,) = layer.blocks[0].parts
        assert isinstance(mixer, Attention | MLA), "the head's layer attends"
        self.attention = mixer
        self.operation = CarryOperation()

    def note(self, token_ids: Tensor, table: Tensor, hidden: Tensor, ctx: Context) -> None:
        """Takes in the step's tokens [T], embedded by `table` [V, C], with the model's hidden
        states [T, C] after them. Writes their KV, which is all that later rows need, and stores the
        last hidden states for the next step."""
        rows = ctx.step.layouts[self.operation]
        assert ctx.carried is not None, "slots carry hidden states for a head"
        joined = self._join(token_ids, table, hidden, (ctx.carried, rows), ctx.pictures)
        mtp.keep(hidden, ctx.carried, rows)
        block, ((number,), *_) = self.layer.blocks[0], self.layer.numbers
        assert isinstance(block, ResidualBlock), "the head adds to one stream"
        assert block.pre is not None, "a norm stands before the head's attention"
        _, normed = block.pre.add(joined, None)
        self.attention.store(normed, ctx, number)

    def run(self, token_ids: Tensor, table: Tensor, before: Tensor, ctx: Context) -> Tensor:
        """Returns hidden states [T, C] after the tokens [T], one per sequence, given the hidden
        states [T, C] before them. Writes their KV first."""
        hidden, delta = self._join(token_ids, table, before), None
        for block, numbers in zip(self.layer.blocks, self.layer.numbers, strict=True):
            hidden, delta = block.run(hidden, delta, ctx, numbers, ends=False)
        return values_of(self.norm.add(hidden, delta)[1])

    def _join(
        self,
        token_ids: Tensor,
        table: Tensor,
        hidden: Tensor,
        carried: tuple[Carried, CarryRows] | None = None,
        pictures: PictureRows | None = None,
    ) -> Tensor:
        if not self.ranks.is_alone or pictures is not None:
            # The table is split over ranks, or lacks pictures, so the embedded rows are passed to
            # the kernel as its table.
            table = put(embed(token_ids, table, self.ranks), pictures)
            token_ids = torch.arange(len(token_ids), device=token_ids.device)
        scales = self.norm_embedding.scale, self.norm_hidden.scale
        eps = self.norm_hidden.eps
        return self.fc(mtp.join(hidden, token_ids, table, scales, eps, carried))
