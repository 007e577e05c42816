"""The embedding: a row of a table for each token.

Legend: T tokens, V rows of the vocabulary on this rank, C hidden size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import rows
from milepost.parallel import Ranks


def embed(token_ids: Tensor, table: Tensor, ranks: Ranks) -> Tensor:
    """Rows [T, C] of `table` [V, C] for `token_ids` [T]; of several ranks, each has equally many
    ids of the vocabulary, in their order."""
    if ranks.is_alone:
        # On a CPU torch's embedding is faster than its indexing.
        return rows.take(table, token_ids) if table.is_cuda else F.embedding(token_ids, table)
    own = token_ids - ranks.rank * len(table)
    is_own = (own >= 0) & (own < len(table))
    return ranks.all_reduce(table[own * is_own] * is_own[:, None])
