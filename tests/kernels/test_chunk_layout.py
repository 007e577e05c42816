"""Where a prefill's tiles, chunks and exports stand."""

from __future__ import annotations

from bisect import bisect
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from milepost.kernels.layout.chunks import ChunkLayout, lay_out, lay_out_chunks


def chunks_of(layout: ChunkLayout) -> list[tuple[int, int, int]]:
    """(first token, size, export slot) of each chunk that has tokens."""
    rows = zip(layout.chunk_begin, layout.chunk_size, layout.chunk_slot, strict=True)
    return [(int(begin), int(size), int(slot)) for begin, size, slot in rows if size > 0]


def test_chunks_and_tiles_of_several_sequences() -> None:
    exports = [(2, 128, 5), (0, 100, 9), (0, 64, 7)]
    layout = lay_out([37, 0, 64], [70, 5, 64], exports, chunk=64)
    assert chunks_of(layout) == [(0, 27, 7), (27, 36, 9), (63, 7, -1), (70, 5, -1), (75, 64, 5)]
    assert layout.sequence_begin.tolist() == [0, 70, 75, 139]
    assert layout.sequence_chunk.tolist() == [0, 3, 4, 5]
    assert layout.tile_sequence[:4].tolist() == [0, 0, 1, 2]
    assert layout.tile_begin[:4].tolist() == [0, 64, 70, 75]
    assert layout.tile_export[:5].tolist() == [0, 2, 2, 2, 3]
    assert layout.export_end.tolist() == [27, 63, 139]
    assert layout.export_slot.tolist() == [7, 9, 5]


def test_shapes_follow_from_capacities_and_padding_is_marked() -> None:
    capacities = {"max_tokens": 200, "max_sequences": 5, "max_exports": 4}
    empty = lay_out([], [], chunk=64, **capacities)
    full = lay_out([3, 9], [120, 60], [(0, 64, 1)], chunk=64, **capacities)
    assert empty.chunk == full.chunk == 64
    for each in fields(full)[1:]:
        first, second = getattr(empty, each.name), getattr(full, each.name)
        assert first.shape == second.shape
        assert first.dtype == second.dtype == np.int32
    assert -empty.chunk_size.sum() == 200
    assert full.chunk_size[full.chunk_size < 0].tolist() == [-20]
    assert (empty.tile_sequence == -1).all()
    assert full.sequence_chunk.tolist() == [0, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("seed", range(20))
def test_chunks_end_at_the_grid_at_exports_and_with_their_sequence(seed: int, chunk: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 9))
    starts, lengths = random.integers(0, 300, count), random.integers(1, 200, count)
    exports = [
        (sequence, int(starts[sequence] + 1 + random.integers(lengths[sequence])), 9 + sequence)
        for sequence in range(count)
        if random.random() < 0.5
    ]
    expected = []
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = {position for owner, position, _ in exports if owner == sequence}
        ends = {*range(0, 500, chunk), start, start + length} | own
        ends = sorted(end for end in ends if start <= end <= start + length)
        first = lengths[:sequence].sum() - start
        expected += [(first + begin, end - begin) for begin, end in pairwise(ends)]
    layout = lay_out(starts, lengths, exports, chunk=chunk)
    assert [each[:2] for each in chunks_of(layout)] == expected
    assert {slot for *_, slot in chunks_of(layout)} - {-1} == {slot for *_, slot in exports}
    rows = lay_out_chunks(starts.tolist(), lengths.tolist(), exports, chunk=chunk)
    sizes, firsts = rows.is_token.sum(1).tolist(), rows.tokens[:, 0].tolist()
    assert sorted(zip(firsts, sizes, strict=True)) == expected
    assert [size for _, size in rows.steps] == sorted((size for _, size in rows.steps))[::-1]
    # In each step the chunks belong to the first sequences of the order, one each.
    begins = [0, *lengths.cumsum().tolist()]
    for first, size in rows.steps:
        owners = [bisect(begins, firsts[chunk]) - 1 for chunk in range(first, first + size)]
        assert owners == rows.order[:size].tolist()


@pytest.mark.parametrize("position", [5, 106])
def test_export_outside_its_sequence_is_refused(position: int) -> None:
    with pytest.raises(AssertionError, match="inside its sequence"):
        lay_out([5], [100], [(0, position, 1)], chunk=64)


def test_position_exported_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="exported once"):
        lay_out([0], [100], [(0, 64, 1), (0, 64, 2)], chunk=64)


def test_batch_beyond_capacity_is_refused() -> None:
    with pytest.raises(AssertionError, match="capacities"):
        lay_out([0], [100], chunk=64, max_tokens=99)
