"""Triton: rows of activations added up over the groups of four-bit weights, for zero points.

Legend: R rows, I inputs, D groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import cdiv

_ROWS = 16
"""Rows of a program."""


def sum_rows(rows: Tensor, depth: int) -> Tensor:
    """Returns sums [D, R] float32 of each `depth` inputs of `rows` [R, I]."""
    num_rows, num_inputs = rows.shape
    sums = rows.new_empty(num_inputs // depth, num_rows, dtype=torch.float32)
    _sum_kernel[(cdiv(num_rows, _ROWS), len(sums))](
        rows,
        sums,
        num_rows,
        rows.stride(0),
        DEPTH=depth,
        ROWS=_ROWS,
        num_warps=4,
        **OVERLAPPED,
    )
    return sums


@quick
@triton.jit(do_not_specialize=("num_rows",))
def _sum_kernel(rows, sums, num_rows, stride, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    launch_dependents()
    wait_for_inputs()
    i_d, o_m = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = o_m < num_rows
    p_x = rows + o_m.to(tl.int64)[:, None] * stride + i_d * DEPTH + tl.arange(0, DEPTH)[None, :]
    b_x = tl.load(p_x, mask=is_row[:, None], other=0.0)
    tl.store(sums + i_d * num_rows + o_m, tl.sum(b_x.to(tl.float32), 1), mask=is_row)
