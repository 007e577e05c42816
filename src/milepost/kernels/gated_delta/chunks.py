"""How the prefill tokens of a batch fall into chunks on the absolute grid.

A chunk never crosses a multiple of CHUNK counted from position 0, so a sequence that starts at
position 100 has a first chunk of 28 tokens, and where a chunk ends doesn't depend on where the
sequence was cut. Only an export between two multiples ends a chunk early, as the prefill would that
ends or resumes there:

    position   0        64       100     128      192  200
    grid       |--------|--------.-------|--------|----.
    chunks                       [  28   ][  64   ][ 8 ]

Chunks are ordered step by step: first the first chunk of every sequence, then the second of those
that have one, and so on. Sequences with more chunks stand first in every step, so that the
sequences of a step are always the first few of the same order, and a step reads contiguous rows.

Legend: T prefill tokens, S sequences, N chunks, C = CHUNK tokens in a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Tokens in a full chunk, and the grid that chunks keep to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Where each token goes; the same for every recurrent layer of a step."""

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


def lay_out_chunks(
    starts: Sequence[int],
    lengths: Sequence[int],
    exports: Sequence[tuple[int, int, int]] = (),
    device: torch.device | str = "cpu",
) -> ChunkLayout:
    """Cut sequences of `lengths` tokens that begin at positions `starts` into chunks.

    `exports` are (sequence, position, slot) with start < position <= start + length; a position off
    the grid cuts the chunk that it falls into.
    """
    exported: list[set[int]] = [set() for _ in lengths]
    for sequence, position, _ in exports:
        consumed = position - starts[sequence]
        assert 0 < consumed <= lengths[sequence], "an export is inside its sequence's new tokens"
        exported[sequence].add(position)
    cuts = [_cut(*each) for each in zip(starts, lengths, exported, strict=True)]
    order = sorted(range(len(cuts)), key=lambda sequence: -len(cuts[sequence]))
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)

    first_tokens, sizes, steps = [], [], []
    for step in range(len(cuts[order[0]]) if order else 0):
        active = [sequence for sequence in order if step < len(cuts[sequence])]
        steps.append((len(sizes), len(active)))
        for sequence in active:
            begin, end = cuts[sequence][step]
            first_tokens.append(begins[sequence] + begin - starts[sequence])
            sizes.append(end - begin)

    tokens, is_token, rows = _index(first_tokens, sizes)
    return ChunkLayout(
        tokens=tokens.to(device),
        is_token=is_token.to(device),
        rows=rows.to(device),
        order=torch.tensor(order, dtype=torch.int64).to(device),
        steps=tuple(steps),
        exports=_place_exports(cuts, order, len(steps), exports),
    )


def _cut(start: int, length: int, exported: set[int]) -> list[tuple[int, int]]:
    """Positions [begin, end) of each chunk of the tokens [start, start + length)."""
    assert length > 0, "a sequence in the batch has tokens"
    end = start + length
    grid = range((start // CHUNK + 1) * CHUNK, end, CHUNK)
    return list(itertools.pairwise(sorted({start, *grid, end} | exported)))


def _index(first_tokens: list[int], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """`tokens`, `is_token` and `rows` of a ChunkLayout."""
    first = torch.tensor(first_tokens, dtype=torch.int64)[:, None]
    size = torch.tensor(sizes, dtype=torch.int64)[:, None]
    row = torch.arange(CHUNK)
    tokens = first + torch.minimum(row, size - 1)
    is_token = row < size
    rows = torch.empty(sum(sizes), dtype=torch.int64)
    rows[tokens[is_token]] = is_token.flatten().nonzero()[:, 0]
    return tokens, is_token, rows


def _place_exports(
    cuts: list[list[tuple[int, int]]],
    order: list[int],
    num_steps: int,
    exports: Sequence[tuple[int, int, int]],
) -> tuple[tuple[tuple[int, int], ...], ...]:
    placed: list[list[tuple[int, int]]] = [[] for _ in range(num_steps)]
    for sequence, position, slot in exports:
        ends = [end for _, end in cuts[sequence]]
        placed[ends.index(position)].append((order.index(sequence), slot))
    return tuple(map(tuple, placed))
