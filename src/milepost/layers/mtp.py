"""The head for multi-token prediction (MTP): from a token and what the model made of the text
before it, what the model would make of the text with it.

    join(x[t + 1], h[t]) = fc(concat(norm(embed(x[t + 1])), norm(h[t])))
    h'[t + 1]            = norm(layer(join))

h[t] is the model's hidden state behind its last norm. Of h' the model's own head makes logits, and
where drafts go on from a draft h' takes the place of h. `layer` is one of full attention, which
sees the joined rows before its own.

The row of x[t + 1] lies in the pages where x[t + 1] lies, one further than implementations have it
that count rows by t. So what a page holds depends on the tokens up to its end and on no other, and
whoever shares the page shares that too. The row of the first token would need a hidden state before
the text: it is written, and never read.

Legend: T tokens, V vocabulary, C hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from milepost.kernels import mtp
from milepost.kernels.mtp import Carried, CarryOperation, CarryRows
from milepost.layers.attention import Attention
from milepost.layers.context import Context
from milepost.layers.embedding import embed
from milepost.layers.linear import Linear
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ParameterKind
from milepost.layers.parts import Layer

FIRST_ROW = 1
"""The first that is read."""


class MTPHead(nn.Module):
    """A head whose tensors stand under `kind.path`; embedding and logits are the model's."""

    rotary = None

    def __init__(
        self, hidden_size: int, layer: Layer, kind: ParameterKind, *, eps: float, offset: float
    ) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            return RMSNorm(hidden_size, eps, kind.under(name), offset=offset)

        self.norm_embedding = norm("pre_fc_norm_embedding")
        self.norm_hidden = norm("pre_fc_norm_hidden")
        self.fc = Linear(2 * hidden_size, (("fc", hidden_size),), kind)
        self.layer = layer
        self.norm = norm("norm")
        self.ranks = kind.ranks
        (mixer,) = layer.blocks[0].parts
        assert isinstance(mixer, Attention), "the head's layer attends"
        self.attention = mixer
        self.operation = CarryOperation()

    def note(self, token_ids: Tensor, table: Tensor, hidden: Tensor, ctx: Context) -> None:
        """Take in the step's tokens [T], embedded by the `table` [V, C], with the model's hidden
        states [T, C] behind them: write their KV, which is all that later rows see of them, and
        carry on the last hidden states."""
        rows = ctx.step.layouts[self.operation]
        assert ctx.carried is not None, "slots carry hidden states for a head"
        joined = self._join(token_ids, table, hidden, ctx.carried, rows)
        mtp.keep(hidden, ctx.carried, rows)
        block, ((number,), *_) = self.layer.blocks[0], self.layer.numbers
        assert block.pre is not None, "a norm stands before the head's attention"
        _, normed = block.pre.add(joined, None)
        self.attention.store(normed, ctx, number)

    def run(self, token_ids: Tensor, table: Tensor, before: Tensor, ctx: Context) -> Tensor:
        """Hidden states [T, C] behind the tokens [T], one of each sequence, with those before them
        [T, C]; their KV is written first."""
        hidden, delta = self._join(token_ids, table, before), None
        for block, numbers in zip(self.layer.blocks, self.layer.numbers, strict=True):
            hidden, delta = block.run(hidden, delta, ctx, numbers)
        return self.norm.add(hidden, delta)[1]

    def _join(
        self,
        token_ids: Tensor,
        table: Tensor,
        hidden: Tensor,
        carried: Carried | None = None,
        rows: CarryRows | None = None,
    ) -> Tensor:
        if not self.ranks.is_alone:
            # Rows of the table are on several ranks; kernels read them as a table of their own.
            table = embed(token_ids, table, self.ranks)
            token_ids = torch.arange(len(token_ids), device=token_ids.device)
        scales = self.norm_embedding.scale, self.norm_hidden.scale
        eps = self.norm_hidden.eps
        return self.fc(mtp.join(token_ids, table, hidden, scales, eps, carried, rows))
