"""Which rows of a matrix a projection's outputs are.

A mixture has thousands of projections with the same rows, of thousands of experts: what is found
out of them is found out once.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from milepost.kernels.quantised import BLOCK


class Rows:
    """Output i of a projection is row `index[i]` of its matrix."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.count = len(index)

    @cached_property
    def _span(self) -> slice | None:
        """The same, where they stand side by side."""
        first = int(self.index[0]) if self.count else 0
        is_span = torch.equal(self.index, torch.arange(first, first + self.count))
        return slice(first, first + self.count) if is_span else None

    @cached_property
    def blocks(self) -> Rows:
        """Blocks of the matrix that the projection's are, where they are whole."""
        return Rows(self.index[::BLOCK] // BLOCK)

    def are_blocks_of(self, num_outputs: int) -> bool:
        """Whether blocks of the projection's outputs are blocks of a matrix's so many rows."""
        ends_whole = self.count % BLOCK == 0 or int(self.index[-1]) == num_outputs - 1
        return ends_whole and self._keep_blocks

    @cached_property
    def _keep_blocks(self) -> bool:
        firsts = self.index[::BLOCK]
        each = firsts.repeat_interleave(BLOCK)[: self.count]
        expected = each + torch.arange(self.count) % BLOCK
        return bool((firsts % BLOCK == 0).all()) and torch.equal(self.index, expected)

    def put(self, matrix: Tensor, values: Tensor) -> None:
        """Write the projection's `values`, row by row, into the matrix."""
        if self._span is not None:
            matrix[self._span].copy_(values)
        else:
            matrix[self.index.to(matrix.device)] = values.to(matrix.device, matrix.dtype)
