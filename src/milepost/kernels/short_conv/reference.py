"""Gated short convolution in plain torch: the definition, on any device.

    out_t = c_t * (bias + sum_j weight[:, j] * (b * x)_{t - (J - 1) + j})        j = 0 .. J - 1

The state beside a page is written by whoever writes the KV of the page's newest token. So a page
that is shared keeps its state, also where a sequence computes some of its tokens again.

Legend: T tokens, D decoding sequences (the first D of the batch), S other sequences, E states that
these write, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.batch import Batch, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvRows:
    """Rows of the pool, row 0 being zeros and row p + 1 beside page p."""

    decodes_in: Tensor
    """[D] int64"""
    decodes_out: Tensor
    """[D] int64"""
    prefills_in: Tensor
    """[S] int64"""
    windows: conv.ConvLayout | None
    """Of the other sequences, with all the states that they write; None where all decode."""


def lay_out(batch: Batch, num_taps: int) -> ShortConvRows:
    """The rows of a step."""
    decodes, device = batch.num_decodes, batch.device
    assert not batch.verifies, "V1: only mixers that keep records verify"
    if (batch.kv_rows[:decodes] < 0).any():
        decodes = 0  # one token that a shared page has already: nothing is written
    owners, ends = np.arange(len(batch.starts)), batch.starts + batch.lengths
    rows_in = torch.from_numpy(find_rows(batch, owners, batch.starts)).to(device)
    rows_out = find_rows(batch, owners[:decodes], ends[:decodes])
    windows = None
    if decodes < len(batch.starts):
        kept = np.array(list(find_kept(batch, decodes)), np.int64).reshape(-1, 2)
        places = zip(kept[:, 0] - decodes, kept[:, 1], find_rows(batch, *kept.T), strict=True)
        starts, lengths = batch.starts[decodes:].tolist(), batch.lengths[decodes:].tolist()
        windows = conv.lay_out_windows(
            starts, lengths, [tuple(map(int, place)) for place in places], num_taps, device
        )
        # Where a sequence stops is among the places already, if it is written at all.
        windows = replace(windows, kept=windows.kept[len(starts) :])
    return ShortConvRows(
        decodes_in=rows_in[:decodes],
        decodes_out=torch.from_numpy(rows_out).to(device),
        prefills_in=rows_in[decodes:],
        windows=windows,
    )


def find_rows(batch: Batch, sequences: Ints, positions: Ints) -> Ints:
    """Where the states of sequences after so many tokens lie."""
    last = np.maximum(positions - 1, 0) // batch.page_size
    pages = batch.tables[batch.rows[sequences], last].astype(np.int64)
    return np.where(positions > 0, pages + 1, 0)


def find_kept(batch: Batch, first: int) -> Iterator[tuple[int, int]]:
    """Sequences from `first` on, with the positions whose states they write."""
    size, begins = batch.page_size, batch.lengths.cumsum() - batch.lengths
    for sequence in range(first, len(batch.starts)):
        start = int(batch.starts[sequence])
        end = start + int(batch.lengths[sequence])
        newest = int(begins[sequence]) - start - 1
        for position in (*range(start // size * size + size, end, size), end):
            if batch.kv_rows[newest + position] >= 0:
                yield sequence, position
            else:
                assert position % size == 0, "a step does not stop inside a shared page"


def mix(
    projected: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, rows: ShortConvRows
) -> Tensor:
    """See `short_conv.mix`."""
    before, behind, x = projected.chunk(3, -1)
    inputs, parts = before * x, []
    num_decodes = len(rows.decodes_in)
    if num_decodes:
        own, places = inputs[:num_decodes], (rows.decodes_in, rows.decodes_out)
        parts.append(conv.decode(own, weight, bias, pool, *places, has_silu=False))
    if rows.windows is not None:
        own, places = inputs[num_decodes:], (rows.prefills_in, rows.prefills_in[:0])
        parts.append(conv.prefill(own, weight, bias, pool, *places, rows.windows, has_silu=False))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).mul_(behind)
