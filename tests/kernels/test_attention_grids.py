"""Grids of attention's kernels: CUDA allows 65,535 programs in a grid's second dimension, and a
step may have more items, or tokens, than that."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from milepost.kernels.attention.arguments import AttentionCall, PartialResults
from milepost.kernels.attention.hopper import narrow, wide
from milepost.kernels.attention.indexed import IndexedTokens, Selection
from milepost.kernels.attention.pages import PagedKV
from milepost.kernels.attention.portable import attend as portable
from milepost.kernels.attention.portable import indexed as indexed_kernel
from milepost.kernels.attention.portable.tiles import KVTiles
from milepost.kernels.attention.tiles import ITEM_SIZE

_MOST = 65535
_NUM, _HEADS, _KV_HEADS, _SIZE = _MOST + 1, 4, 2, 128


class Launches:
    """Stands for a kernel and notes the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_arguments, **_options: None


def _kv(dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    scales = torch.ones(2, _KV_HEADS) if dtype.itemsize == 1 else None
    pool = torch.zeros(2, 3, 64, _KV_HEADS, _SIZE, dtype=torch.bfloat16).to(dtype)
    return PagedKV(pool, torch.zeros(1, 2, dtype=torch.int32), scales)


@pytest.mark.parametrize(
    ("module", "dtype", "tiles"),
    [
        (wide, torch.bfloat16, None),
        (narrow, torch.float8_e4m3fn, None),
        (portable, torch.bfloat16, KVTiles(block=64, num_warps=4, num_stages=2)),
    ],
    ids=["wide", "narrow", "portable"],
)
def test_any_number_of_items_is_launched(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, dtype: torch.dtype, tiles: Any
) -> None:
    kernel = Launches()
    monkeypatch.setattr(module, "_attend_kernel", kernel)
    query = torch.zeros(1, _HEADS, _SIZE, dtype=torch.bfloat16)
    partials = torch.zeros(1, _HEADS, _SIZE)
    call = AttentionCall(
        query=query,
        gate=None,
        kv=_kv(dtype),
        scale=1.0,
        bases=torch.zeros(2, dtype=torch.int32),
        partials=PartialResults(partials, partials[:, :, 0]),
        output=query.flatten(1),
    )
    module.attend(call, torch.zeros(_NUM, ITEM_SIZE, dtype=torch.int32), 16, tiles)
    _check(kernel)


def test_any_number_of_tokens_attends_to_selected_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Launches()
    monkeypatch.setattr(indexed_kernel, "_attend_kernel", kernel)
    monkeypatch.setattr(indexed_kernel, "select", lambda *_: torch.zeros(_NUM, 1))
    numbers = torch.zeros(_NUM, dtype=torch.int32)
    selection = Selection(
        query=torch.zeros(1, 1, 16),
        norm_scale=torch.ones(16),
        eps=1e-6,
        angles=lambda positions: (positions, positions),
        num_turned=0,
        ratio=1,
        budget=1,
    )
    query = torch.zeros(1, _HEADS, _SIZE).expand(_NUM, -1, -1)
    tokens = IndexedTokens(rows=numbers, positions=numbers, tiles=numbers)
    indexed_kernel.attend(query, None, _kv(), tokens, 1.0, selection)
    _check(kernel)


def _check(kernel: Launches) -> None:
    (grid,) = kernel.grids
    assert torch.Size(grid).numel() == _NUM * _KV_HEADS
    assert all(programs <= _MOST for programs in grid[1:])
