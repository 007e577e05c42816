"""Where tokens stand in chunks, for the recurrences' reference kernels.

Legend: T tokens, S sequences, N chunks, C tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.layout.chunks import lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """Where each token goes; the same for every recurrent layer of a step.

    Chunks (see `chunks`) are ordered step by step: first the first chunk of every sequence, then
    the second of those that have one, and so on. Sequences with more chunks stand first in every
    step, so that the sequences of a step are always the first few of the same order, and a step
    reads contiguous rows.
    """

    tokens: Tensor
    """[N, C] int64, token at each row of a chunk; rows past its end repeat its last token."""
    is_token: Tensor
    """[N, C] bool, false past a chunk's end."""
    rows: Tensor
    """[T] int64, row of the flattened [N * C] at which each token stands."""
    order: Tensor
    """[S] int64, the sequences, those with more chunks first."""
    steps: tuple[tuple[int, int], ...]
    """First chunk and number of chunks of each step; the chunks belong to the first sequences of
    `order`."""
    exports: tuple[tuple[tuple[int, int], ...], ...]
    """For each step, (index into `order`, slot) of each state to be written after it."""

    @property
    def chunk(self) -> int:
        """Tokens in a full chunk."""
        return self.tokens.shape[1]


def lay_out_chunks(
    starts: Sequence[int],
    lengths: Sequence[int],
    exports: Sequence[tuple[int, int, int]] = (),
    *,
    chunk: int,
    device: torch.device | str = "cpu",
) -> ChunkRows:
    """The chunks of `chunks.lay_out`, ordered step by step."""
    layout = lay_out(starts, lengths, exports, chunk=chunk)
    num_chunks = int(layout.sequence_chunk[-1])
    counts = np.diff(layout.sequence_chunk)
    order = np.argsort(-counts, kind="stable")
    owner = np.arange(len(counts)).repeat(counts)
    step = np.arange(num_chunks) - layout.sequence_chunk[owner]
    rank = np.argsort(order)[owner]
    chunks = np.lexsort((rank, step))
    sizes = np.bincount(step)
    placed: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for index in np.flatnonzero(layout.chunk_slot >= 0).tolist():
        placed[step[index]].append((int(rank[index]), int(layout.chunk_slot[index])))
    begin, size = (
        torch.from_numpy(each[chunks].astype(np.int64))[:, None]
        for each in (layout.chunk_begin, layout.chunk_size)
    )
    row = torch.arange(chunk)
    tokens = begin + torch.minimum(row, size - 1)
    is_token = row < size
    rows = torch.empty(int(layout.sequence_begin[-1]), dtype=torch.int64)
    rows[tokens[is_token]] = is_token.flatten().nonzero()[:, 0]
    return ChunkRows(
        tokens=tokens.to(device),
        is_token=is_token.to(device),
        rows=rows.to(device),
        order=torch.from_numpy(order).to(device),
        steps=tuple(zip((sizes.cumsum() - sizes).tolist(), sizes.tolist(), strict=True)),
        exports=tuple(map(tuple, placed)),
    )
