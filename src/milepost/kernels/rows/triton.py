"""Triton: rows of a table.

Legend: T rows that are taken, V rows of the table, N numbers of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv, check_contiguous, next_power_of_2

_BLOCK = 1024


def take(table: Tensor, places: Tensor) -> Tensor:
    """Returns rows [T, N] of `table` [V, N] at `places` [T]."""
    check_contiguous(table=table, places=places)
    num_rows, size = len(places), table.shape[1]
    # The table may lie in pinned host memory.
    output = torch.empty(num_rows, size, dtype=table.dtype, device=places.device)
    block = min(_BLOCK, next_power_of_2(size))
    _take_kernel[(num_rows, cdiv(size, block))](
        table, places, output, SIZE=size, BLOCK=block, num_warps=4, **OVERLAPPED
    )
    return output


@quick
@triton.jit(do_not_specialize_on_alignment=["places"])
def _take_kernel(table, places, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    i_r = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    place = tl.load(places + i_r).to(tl.int64)
    b_x = tl.load(table + place * SIZE + o_n, mask=o_n < SIZE)
    tl.store(output + i_r * SIZE + o_n, b_x, mask=o_n < SIZE)
