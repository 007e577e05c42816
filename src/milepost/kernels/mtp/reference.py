"""The inputs of an MTP head in plain torch: the definition, on any device.

Legend: T tokens, V vocabulary, C hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.mtp.rows import Carried, CarryRows
from milepost.kernels.platform.tensors import cast


def join(
    hidden: Tensor,
    token_ids: Tensor,
    table: Tensor,
    scales: tuple[Tensor, Tensor],
    eps: float,
    carried: tuple[Carried, CarryRows] | None = None,
) -> Tensor:
    """[T, 2 * C]: the embeddings of `token_ids` [T] from the `table` [V, C], and the hidden states
    before them, each normed with its of the `scales` [C].

    Before token t stands row t of `hidden` [T, C]; or, with `carried`, row t - 1, and before a
    sequence's first what is carried.
    """
    embedded = F.embedding(token_ids, table)
    before = hidden if carried is None else _shift(hidden, *carried)
    return torch.cat((_norm(embedded, scales[0], eps), _norm(before, scales[1], eps)), -1)


def _shift(hidden: Tensor, carried: Carried, rows: CarryRows) -> Tensor:
    where, place = rows.sources.unbind(1)
    before = torch.cat((hidden[:1], hidden[:-1]))
    in_slot = (where >= 0) & (place < 0)
    before[in_slot] = carried.states[where[in_slot]]
    if carried.records is not None:
        in_record = place >= 0
        before[in_record] = carried.records[where[in_record], place[in_record]]
    return before


def _norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(cast(x, scale.dtype), x.shape[-1:], eps=eps).mul_(scale)
    return cast(normed, x.dtype)


def keep(hidden: Tensor, carried: Carried, rows: CarryRows) -> None:
    """Carry on rows of `hidden` [T, C], and records, and record others, as `rows` say."""
    token, slot, row, place = rows.targets.long().unbind(1)
    in_batch = token >= 0
    carried.states[slot[in_batch]] = hidden[token[in_batch]]
    if carried.records is None:
        return
    in_record = (token < 0) & (slot >= 0)
    carried.states[slot[in_record]] = carried.records[row[in_record], place[in_record]]
    row, place = rows.recorded.unbind(1)
    is_draft = row >= 0
    carried.records[row[is_draft], place[is_draft]] = hidden[is_draft]
