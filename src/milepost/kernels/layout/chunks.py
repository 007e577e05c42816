"""How the tokens of a prefill fall into chunks on the absolute grid, in arrays of fixed capacities.

Everything is counted in tokens of the batch, sequence after sequence. A *chunk*, the unit of a
recurrence (the delta rule, SSD), ends at every multiple of its size of the absolute position, at
every export and at its sequence's end: where it ends doesn't depend on where the sequence was cut,
and an export ends it as the prefill would that ends or resumes there. A *tile*, the convolution's
unit, is up to TILE tokens of one sequence, counted from its first: the first tile of a sequence
alone reads the convolution state, so nobody else can read it after it was overwritten.

With chunks of 64:

    tokens of the batch   0            70     75                139
    sequences             [ 0 from 37  ][ 1  ][ 2 from 64       .
    tiles                 [   64   ][6 ][ 5  ][ 64              ]
    chunks                [27][  43    ][ 5  ][ 64              ]

Legend: S sequences, E exports, L tiles, N chunks, each with its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.layout.batch import Batch, Ints

TILE = 64
"""Tokens in a full tile."""

Array = Any
"""A numpy int32 array on the host; a tensor once the runner has sent the layout to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Chunks and tiles of a step's tokens, shared by all recurrent layers."""

    chunk: int
    """Tokens in a full chunk."""
    sequence_begin: Array
    """[S + 1], first token of each sequence, then the number of tokens (also past the last)."""
    sequence_chunk: Array
    """[S + 1], first chunk of each sequence, then the number of chunks (also past the last)."""
    tile_sequence: Array
    """[L], sequence of each tile, -1 past the last."""
    tile_begin: Array
    """[L], first token of each tile."""
    tile_export: Array
    """[L + 1], the exports from this one up to the next tile's lie in or at the end of the tile."""
    export_end: Array
    """[E], token before which the export's state stands, ascending."""
    export_slot: Array
    """[E], slot to which the state is written."""
    chunk_begin: Array
    """[N], first token of each chunk."""
    chunk_size: Array
    """[N], its tokens; 0 past the last, and -n for n tokens that no sequence has."""
    chunk_slot: Array
    """[N], slot to which the state after the chunk is exported, or -1."""


def lay_out_step(batch: Batch, chunk: int) -> ChunkLayout:
    """Returns `lay_out` of a whole step, with the capacities of its graph."""
    return lay_out(
        batch.starts,
        batch.lengths,
        batch.exports,
        chunk=chunk,
        max_tokens=batch.capacity.num_tokens,
        max_sequences=batch.capacity.num_sequences,
        max_exports=batch.capacity.num_exports,
    )


def lay_out(
    starts: Sequence[int] | Ints,
    lengths: Sequence[int] | Ints,
    exports: Sequence[tuple[int, int, int]] = (),
    *,
    chunk: int,
    first: int = 0,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    max_exports: int | None = None,
) -> ChunkLayout:
    """Places sequences of `lengths` > 0 tokens that begin at positions `starts`; full chunks have
    `chunk` tokens.

    `exports` are (sequence, position, slot) with start < position <= start + length, at most one
    per position. Tokens before `first` belong to other sequences. Capacities default to what is
    needed, and shapes follow from them alone.
    """
    start, length = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    end = first + length.cumsum()
    begin = end - length
    num_tokens = int(end[-1]) if len(end) else first
    tokens = num_tokens if max_tokens is None else max_tokens
    sequences = len(end) if max_sequences is None else max_sequences
    num_exports = len(exports) if max_exports is None else max_exports
    fits = num_tokens <= tokens, len(end) <= sequences, len(exports) <= num_exports
    assert all(fits), "a batch stays within its capacities"

    export_end, export_slot = _sort_exports(exports, start, begin, length)
    tile_end, tile_sequence = _grid_ends(np.zeros_like(start), length, begin, TILE)
    tile_begin = _begins(tile_end, first)
    max_tiles = min(tokens, (tokens + (TILE - 1) * sequences) // TILE)
    chunk_end, _ = _grid_ends(start, length, begin, chunk)
    between = export_end[chunk_end[chunk_end.searchsorted(export_end)] != export_end]
    if len(between):
        chunk_end = np.sort(np.concatenate((chunk_end, between)))
    chunk_begin = _begins(chunk_end, first)
    # A sequence of n tokens touches at most (n + 126) // 64 pieces of a grid of 64.
    touched = (tokens + 2 * (chunk - 1) * sequences) // chunk
    max_chunks = min(tokens, touched + num_exports) + 1
    chunk_slot = np.full(max_chunks, -1, np.int32)
    chunk_slot[chunk_end.searchsorted(export_end)] = export_slot
    spare_begin = np.arange(num_tokens, tokens, chunk)
    spare_size = np.minimum(tokens - spare_begin, chunk)
    return ChunkLayout(
        chunk=chunk,
        sequence_begin=_padded(sequences + 1, num_tokens, begin),
        sequence_chunk=_padded(sequences + 1, len(chunk_end), chunk_begin.searchsorted(begin)),
        tile_sequence=_padded(max_tiles, -1, tile_sequence),
        tile_begin=_padded(max_tiles, 0, tile_begin),
        tile_export=_padded(
            max_tiles + 1, len(exports), export_end.searchsorted(tile_begin, "right")
        ),
        export_end=_padded(num_exports, 0, export_end),
        export_slot=_padded(num_exports, -1, export_slot),
        chunk_begin=_padded(max_chunks, 0, chunk_begin, spare_begin),
        chunk_size=_padded(max_chunks, 0, chunk_end - chunk_begin, -spare_size),
        chunk_slot=chunk_slot,
    )


def _grid_ends(start: Array, length: Array, begin: Array, grid: int) -> tuple[Array, Array]:
    """Cuts each sequence at the multiples of `grid`, counted from the position `start` of its first
    token. Returns the token at which each piece ends, and the piece's sequence."""
    first = start // grid
    pieces = (start + length - 1) // grid - first + 1
    sequence = np.arange(len(start)).repeat(pieces)
    # Piece i of a sequence ends at grid line first + 1 + i; the last at the sequence's end.
    before = pieces.cumsum() - pieces
    end = np.arange(len(sequence)) * grid
    end += ((first + 1 - before) * grid + begin - start)[sequence]
    return np.minimum(end, (begin + length)[sequence], out=end), sequence


def _sort_exports(
    exports: Sequence[tuple[int, int, int]], start: Array, begin: Array, length: Array
) -> tuple[Array, Array]:
    """Returns the token before which each export stands, ascending, and its slot."""
    found: dict[int, int] = {}
    sequences = list(zip(start.tolist(), length.tolist(), begin.tolist(), strict=True))
    for sequence, position, slot in exports:
        own_start, own_length, own_begin = sequences[sequence]
        consumed = position - own_start
        assert 0 < consumed <= own_length, "an export is inside its sequence's new tokens"
        found[own_begin + consumed] = slot
    assert len(found) == len(exports), "a position is exported once"
    ends = sorted(found)
    return np.array(ends, np.int64), np.array([found[end] for end in ends], np.int64)


def _begins(ends: Array, first: int) -> Array:
    """Returns the begins of consecutive pieces, the first at `first`, that end at `ends`."""
    begins = np.empty_like(ends)
    begins[:1] = first
    begins[1:] = ends[:-1]
    return begins


def _padded(capacity: int, filler: int, *parts: Array) -> Array:
    """Joins `parts` and pads them with `filler` up to `capacity`."""
    padded = np.empty(capacity, np.int32)
    first = 0
    for part in parts:
        padded[first : first + len(part)] = part
        first += len(part)
    padded[first:] = filler
    return padded


# --- for the reference kernels; C tokens in a chunk -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """Chunks of a step's tokens for the reference kernels, shared by all recurrent layers.

    Chunks are ordered step by step: first the first chunk of every sequence, then the second of
    those that have one, and so on. Sequences with more chunks stand first in every step, so that
    the sequences of a step are always the first few of the same order, and a step reads contiguous
    rows.
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
    starts: Sequence[int] | Ints,
    lengths: Sequence[int] | Ints,
    exports: Sequence[tuple[int, int, int]] = (),
    *,
    chunk: int,
    device: torch.device | str = "cpu",
) -> ChunkRows:
    """Returns the chunks of `lay_out`, ordered step by step."""
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
