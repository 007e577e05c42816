"""How the attention kernel for any chip is cut up, by head size, type and chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from milepost.kernels.attention.items import NARROW_ROWS
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tiles import next_power_of_2


@dataclass(frozen=True, slots=True)
class KVTiles:
    """How a kernel is compiled: KV positions of a block, warps, and stages of the two loops."""

    block: int
    num_warps: int
    num_stages: int
    tail_stages: int

    def shared_bytes(self, rows: int, head_dim: int) -> int:
        """Shared memory of a program in 16-bit types, no less than it takes: its queries, and
        the blocks of KV that are under way."""
        blocks = max(self.num_stages - 1, self.tail_stages + 1) + 0.5
        return int((rows + blocks * self.block) * head_dim * 2)


_TESTED = KVTiles(16, 4, 1, 1)
"""For float32, whose products are unrolled multiplications, slow to compile."""
_CROWDED = (KVTiles(64, 4, 2, 2), KVTiles(32, 4, 2, 2))
"""Several share an SM, and each other's waits."""
_NARROW_LARGE = (KVTiles(64, 4, 5, 2), KVTiles(32, 4, 4, 2), KVTiles(32, 4, 2, 2))
"""A page is looked up two blocks before its KV is loaded, and that two before it is used."""
_NARROW_FLOAT8 = (KVTiles(64, 4, 5, 2), KVTiles(32, 4, 4, 2), KVTiles(32, 4, 2, 2))
_NARROW = (KVTiles(128, 4, 5, 2), KVTiles(64, 4, 4, 2), KVTiles(64, 4, 2, 2))
_HALF = (KVTiles(64, 4, 3, 2), KVTiles(32, 4, 3, 2), KVTiles(16, 4, 2, 2))
_HALF_UNPACKED = (KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
"""Of large heads in float8 that no instruction takes apart: over four warps it spills. Of other
heads the longest blocks would."""
_WIDE_LARGE = (KVTiles(64, 8, 3, 2), KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
_WIDE = (KVTiles(128, 8, 3, 2), KVTiles(64, 8, 3, 2), KVTiles(32, 8, 2, 2))


def choose_shape(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    chip: Chip,
    *,
    are_many: bool = False,
    is_float8: bool = False,
) -> KVTiles:
    """Of the shapes that fit the chip the first: that measured best on an H200 (see
    bench/kernels/attention.py), then ever smaller ones."""
    if dtype == torch.float32:
        return _TESTED
    large = head_dim > 128
    if rows <= 2 * NARROW_ROWS and is_float8:
        shapes = _NARROW_FLOAT8
    elif rows <= 2 * NARROW_ROWS:
        shapes = _CROWDED if large and are_many else _NARROW_LARGE if large else _NARROW
    elif rows < 128:
        shapes = _HALF_UNPACKED if large and is_float8 and chip.unpacks_fp8 else _HALF
    elif large:
        shapes = _WIDE_LARGE
    else:
        shapes = _WIDE[1:] if is_float8 and chip.unpacks_fp8 else _WIDE
    block_e = max(16, next_power_of_2(head_dim))
    room = chip.shared_bytes
    fitting = (shape for shape in shapes if shape.shared_bytes(rows, block_e) <= room)
    shape = next(fitting, shapes[-1])
    stages = chip.choose_stages(shape.num_stages, shape.block * block_e * 2)
    return replace(shape, num_stages=stages)
