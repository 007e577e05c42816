"""The rows of a matrix that a projection's outputs are.

A mixture has thousands of projections with the same rows, one per expert, so properties of the rows
are computed once and shared.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from milepost.kernels.products.forms.quantised import BLOCK


class Rows:
    """Row numbers of a projection: output i is row `index[i]` of its matrix."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.count = len(index)

    @cached_property
    def _span(self) -> slice | None:
        """The rows as a slice, or None if they are not adjacent."""
        first = int(self.index[0]) if self.count else 0
        is_span = torch.equal(self.index, torch.arange(first, first + self.count))
        return slice(first, first + self.count) if is_span else None

    @cached_property
    def blocks(self) -> Rows:
        """The matrix's blocks that the projection's blocks are, if they are whole."""
        return Rows(self.index[::BLOCK] // BLOCK)

    def are_blocks_of(self, num_outputs: int) -> bool:
        """Whether the projection's blocks are whole blocks of a matrix of `num_outputs` rows."""
        ends_whole = self.count % BLOCK == 0 or int(self.index[-1]) == num_outputs - 1
        return ends_whole and self._keep_blocks

    @cached_property
    def _keep_blocks(self) -> bool:
        firsts = self.index[::BLOCK]
        each = firsts.repeat_interleave(BLOCK)[: self.count]
        expected = each + torch.arange(self.count) % BLOCK
        return bool((firsts % BLOCK == 0).all()) and torch.equal(self.index, expected)

    def put(self, matrix: Tensor, values: Tensor) -> None:
        """Writes the projection's `values` into the matrix, row by row."""
        if self._span is not None:
            matrix[self._span].copy_(values)
        else:
            matrix[self.index.to(matrix.device)] = values.to(matrix.device, matrix.dtype)
