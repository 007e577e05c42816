"""Room for rows in FP8."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.layout import emit
from milepost.kernels.layout.emit import Emit, room_for
from milepost.kernels.platform.tables import SumOrder


@pytest.mark.parametrize(
    ("num_rows", "order", "is_made"),
    [
        (0, SumOrder.FIXED, False),
        (1, SumOrder.FREE, False),
        (1, SumOrder.FIXED, True),
        (2, SumOrder.FREE, True),
        (2, SumOrder.FIXED, True),
    ],
)
def test_one_row_is_rounded_for_products_with_one_order(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, *, order: SumOrder, is_made: bool
) -> None:
    """Others of one row round it on the way."""
    monkeypatch.setattr(emit, "reads_rounded", lambda _: True)
    like = torch.empty(1, 256, dtype=torch.bfloat16)
    room = room_for(num_rows, 256, like, Emit.FP8, order=order)
    assert (room is not None) == is_made
    assert room_for(num_rows, 256, like, Emit.VALUES, order=order) is None
    if room is not None:
        assert room.values.shape == (4, 256)
        assert room.scales.shape == (2, 4)
        assert not room.is_alone
