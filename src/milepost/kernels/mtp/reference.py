"""What an MTP head reads, in plain torch: the definition, on any device.

Legend: T tokens, V vocabulary, C hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.mtp.rows import CarryRows
from milepost.kernels.precision import cast


def join(
    token_ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    scales: tuple[Tensor, Tensor],
    eps: float,
    carried: Tensor | None = None,
    rows: CarryRows | None = None,
) -> Tensor:
    """[T, 2 * C]: the embeddings of `token_ids` [T] from the `table` [V, C], and the hidden states
    before them, each normed with its of the `scales` [C].

    Before token t stands row t of `hidden` [T, C]; or, with `rows`, row t - 1, and before a
    sequence's first what the slot of `carried` [slots, C] has that `rows` names.
    """
    embedded = F.embedding(token_ids, table)
    before = hidden if rows is None or carried is None else _shift(hidden, carried, rows)
    return torch.cat((_norm(embedded, scales[0], eps), _norm(before, scales[1], eps)), -1)


def _shift(hidden: Tensor, carried: Tensor, rows: CarryRows) -> Tensor:
    if len(hidden) == 1:
        return carried[rows.sources]
    is_first = rows.sources >= 0
    before = torch.cat((hidden[:1], hidden[:-1]))
    before[is_first] = carried[rows.sources[is_first]]
    return before


def _norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(cast(x, scale.dtype), x.shape[-1:], eps=eps).mul_(scale)
    return cast(normed, x.dtype)


def keep(hidden: Tensor, carried: Tensor, rows: CarryRows) -> None:
    """Have slots of `carried` [slots, C] carry rows of `hidden` [T, C], as `rows` say."""
    tokens, slots = rows.targets.long().unbind(1)
    carried.index_copy_(0, slots, hidden.index_select(0, tokens))
