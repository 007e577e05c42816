"""Reads states from the slots of a pool, and writes them."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDEST = torch.complex128
"""On a CPU torch copies rows to an index element by element: 16 bytes at a time are three times as
fast as 4."""


def read(pool: Tensor, slot_in: Tensor, slot_out: Tensor, dtype: torch.dtype) -> Tensor:
    """The states at `slot_in` [S], as `dtype`, to be changed and then written to `slot_out` [S].

    They are contiguous. On a CPU they are the pool's own memory where nothing speaks against it:
    each state is written where it was read, and they lie side by side, as those of requests that
    came together do, with nothing between them.
    """
    if pool.device.type == "cpu" and pool.dtype == dtype:
        places = slot_out.tolist()
        if places == list(range(places[0], places[0] + len(places))) == slot_in.tolist():
            states = pool[places[0] : places[0] + len(places)]
            if states.is_contiguous():
                return states
    return pool.index_select(0, slot_in).to(dtype)


def write(pool: Tensor, slot_out: Tensor, states: Tensor) -> None:
    """pool[slot_out] = states: `slot_out` [S], all different; `states` [S, ...] of any float type,
    or what `read` gave for these slots."""
    if states.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr():
        return
    states = states.to(pool.dtype)
    rows, sources = pool.flatten(1), states.flatten(1)
    if pool.device.type == "cpu" and rows.shape[1] * pool.itemsize % _WIDEST.itemsize == 0:
        rows, sources = rows.view(_WIDEST), sources.contiguous().view(_WIDEST)
    rows.index_copy_(0, slot_out, sources)
