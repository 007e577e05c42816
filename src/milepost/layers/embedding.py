"""The embedding: a row of a table for each token, or of a picture.

Legend: T tokens, V rows of the vocabulary on this rank, C hidden size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import rows
from milepost.layers.context import PictureRows
from milepost.parallel import Ranks


def embed(token_ids: Tensor, table: Tensor, ranks: Ranks) -> Tensor:
    """Returns rows [T, C] of `table` [V, C] for `token_ids` [T]. Each rank holds an equal share of
    the vocabulary's ids, in rank order."""
    if ranks.is_alone:
        # torch's embedding is faster than its indexing on a CPU.
        return rows.take(table, token_ids) if table.is_cuda else F.embedding(token_ids, table)
    local = token_ids - ranks.rank * len(table)
    is_own = (local >= 0) & (local < len(table))
    return ranks.all_reduce(table[local * is_own] * is_own[:, None])


def put(embedded: Tensor, pictures: PictureRows | None) -> Tensor:
    """Returns `embedded` [T, C], in which tokens of pictures have the tower's embeddings."""
    if pictures is None:
        return embedded
    return embedded.index_copy(0, pictures.tokens, pictures.embeddings)
