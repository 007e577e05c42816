"""Runs the kernel that `products.table` chooses for rows and one weight.

The entry of each kernel's module takes a `Multiplication` and its tiles. It returns `into`, filled,
or a tensor of its own: [T, O], or split-K partials [T, S, O].

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from milepost.kernels.layout.emit import Activations, values_of
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.products.forms.matrix import Epilogue, Form, Matrix, Raw
from milepost.kernels.products.table import PRODUCTS, Product

_UNROUNDED = Epilogue.PARTIALS, Epilogue.FLOAT32


class Multiplication(NamedTuple):
    """Rows, a weight, and what becomes of their product. A tuple, for every launch makes one."""

    rows: Activations
    """[T, I]"""
    weight: Form
    """[O, I]"""
    bias: Tensor | None = None
    epilogue: Epilogue = Epilogue.NONE
    into: Tensor | None = None
    """[T, O], whose rows may lie apart."""
    beside: Raw | None = None
    """[R, I]"""
    launch_dependents: bool = True
    """Whether the next kernel may start early."""

    @property
    def values(self) -> Tensor:
        """The rows in the model's dtype."""
        return values_of(self.rows)

    @property
    def chip(self) -> Chip:
        return probe(self.rows.device)

    @property
    def is_gated(self) -> bool:
        return self.epilogue is Epilogue.GATED

    @property
    def product(self) -> Product:
        """The product as the table sees it."""
        epilogue, weight, values = self.epilogue, self.weight, self.rows.values
        raw = weight if isinstance(weight, Raw) else self.beside
        if not isinstance(weight, Raw) and self.into is None and epilogue is Epilogue.NONE:
            # A launch of its own adds partials up: it costs less than what they gain.
            epilogue = Epilogue.PARTIALS
        alignment, is_contiguous = 16, True
        if values is not None:
            stride, step = values.stride()
            is_contiguous = step == 1
            alignment = 16 if stride % 16 == 0 else 8 if stride % 8 == 0 else 1
            if values.data_ptr() % 16 or (raw is not None and raw.values.data_ptr() % 16):
                alignment = 1
        return Product(
            weight=Matrix.of(weight),
            num_rows=len(self.rows),
            epilogue=epilogue,
            has_bias=self.bias is not None,
            alignment=alignment,
            is_contiguous=is_contiguous,
            num_beside=0 if self.beside is None else self.beside.num_outputs,
        )

    def new_output(self, split_k: int = 1) -> Tensor:
        """Returns an unfilled, contiguous output [T, O], or partials [S, T, O]."""
        num_rows, width = len(self.rows), self.weight.num_outputs
        if split_k > 1:
            return self.rows.new_empty(split_k, num_rows, width, dtype=torch.float32)
        is_wide = self.epilogue is Epilogue.FLOAT32 and isinstance(self.weight, Raw)
        dtype = torch.float32 if is_wide else None
        return self.rows.new_empty(num_rows, width // (1 + self.is_gated), dtype=dtype)

    def output(self, split_k: int = 1) -> Tensor:
        """Returns `into`, if it can be written at once, or a new output."""
        return self.new_output(split_k) if self.into is None or split_k > 1 else self.into


def run(given: Multiplication) -> Tensor | None:
    """Returns `into` or a new tensor with what the epilogue asks for; None if no kernel serves the
    product."""
    rows, into = given.rows, given.into
    if rows.dtype.itemsize != 2:
        return None
    if len(rows) == 0:
        return given.output()
    choice = PRODUCTS.choose(given.product, given.chip)
    if choice is None:
        return None
    output: Tensor = choice.kernel.run(given, choice.tiles)
    if output.dim() == 3 and given.epilogue not in _UNROUNDED:
        from milepost.kernels.products.portable.gemm import add_up

        return add_up(output, rows.dtype, into)
    return output if into is None or output is into else into.copy_(output)
