"""Runs the kernels that the tables choose: for rows and one weight, and for routed experts.

The entry of a dense kernel takes a `Multiplication` and its tiles. It returns `into`, filled, or a
new tensor: [T, O], or split-K partials [T, S, O]. The entry of an expert kernel takes `RoutedRows`
and returns partials [T, P, H]: one per expert of a token, or one in all.

Legend: T tokens, I inputs, O outputs, S split-K partials; H hidden size, X experts, N experts of a
token, I an expert's size.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from milepost.kernels.layout.emit import Activations, Inputs, as_activations, values_of
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.products.expert_table import EXPERTS, Mixture
from milepost.kernels.products.forms import Epilogue, Form, KernelForm, Matrix, Packed, Raw
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.table import PRODUCTS, Product

F = TypeVar("F", bound=KernelForm)
_UNROUNDED = Epilogue.PARTIALS, Epilogue.FLOAT32


class Multiplication(NamedTuple):
    """Rows, a weight, and what becomes of their product. A tuple because every launch makes one."""

    rows: Activations
    """[T, I]"""
    weight: Form
    """[O, I]"""
    bias: Tensor | None = None
    epilogue: Epilogue = Epilogue.NONE
    into: Tensor | None = None
    """[T, O], whose rows may be strided."""
    beside: Raw | None = None
    """[R, I]"""
    launch_dependents: bool = True
    """Whether the next kernel may start early."""
    order: SumOrder = SumOrder.FREE
    """Order of sums, or the weight's own if that is stricter."""

    @property
    def values(self) -> Tensor:
        """The rows in the model's dtype."""
        return values_of(self.rows)

    @property
    def chip(self) -> Chip:
        return probe(self.rows.device)

    def weight_as(self, form: type[F]) -> F:
        """Returns the weight, whose form the table has checked."""
        assert isinstance(self.weight, form), "the kernel's form"
        return self.weight

    @property
    def is_gated(self) -> bool:
        return self.epilogue is Epilogue.GATED

    @property
    def product(self) -> Product:
        """The properties of the product that the table chooses by."""
        epilogue, weight, values = self.epilogue, self.weight, self.rows.values
        raw = weight if isinstance(weight, Raw) else self.beside
        if not isinstance(weight, Raw) and self.into is None and epilogue is Epilogue.NONE:
            # A separate launch adds up the partials, and costs less than splitting gains.
            epilogue = Epilogue.PARTIALS
        alignment, is_contiguous = 16, True
        if values is not None:
            stride, step = values.stride()
            is_contiguous = step == 1
            alignment = 16 if stride % 16 == 0 else 8 if stride % 8 == 0 else 1
            if values.data_ptr() % 16 or (raw is not None and raw.values.data_ptr() % 16):
                alignment = 1
        return Product(
            weight=Matrix.of(weight, self.order),
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
        """Returns `into` if the kernel can write there, else a new output."""
        return self.new_output(split_k) if self.into is None or split_k > 1 else self.into


def run_product(given: Multiplication) -> Tensor | None:
    """Runs the kernel that the table chooses. Returns `into` or a new tensor, as the epilogue asks;
    None if no kernel serves the product."""
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


class RoutedRows(NamedTuple):
    """Rows, the experts that each row was routed to, and all experts' weights."""

    rows: Activations
    """[T, H], each row contiguous."""
    routing_weights: Tensor
    """[T, N]"""
    experts: Tensor
    """[T, N] int32; no token has an expert twice."""
    up: KernelForm
    """[X, 2 * I, H], gates before ups, or [X, I, H] for experts that square a ReLU."""
    down: KernelForm
    """[X, H, I]"""
    limit: float = 0.0
    """Limit of SwiGLU's factors: see `norm.silu_mul`. 0 if there is none."""
    order: SumOrder = SumOrder.FREE
    """Order of sums, or the weights' own if that is stricter."""

    @property
    def chip(self) -> Chip:
        return probe(self.rows.device)

    @property
    def values(self) -> Tensor:
        """The rows in the model's dtype."""
        return values_of(self.rows)

    def weights(self, form: type[F]) -> tuple[F, F]:
        """Returns `up` and `down`, whose form the table has checked."""
        up, down = self.up, self.down
        assert isinstance(up, form), "the kernel's form"
        assert isinstance(down, form), "the kernel's form"
        return up, down

    @property
    def num_routed(self) -> int:
        return self.experts.numel()

    @property
    def num_experts(self) -> int:
        return len(self.up.values if isinstance(self.up, Raw) else self.up.scales)

    @property
    def size(self) -> int:
        return self.down.num_inputs

    @property
    def is_gated(self) -> bool:
        return self.up.num_outputs == 2 * self.size

    @property
    def rows_each(self) -> float:
        """Rows of an expert, on average."""
        return self.num_routed / self.num_experts

    @property
    def mixture(self) -> Mixture:
        """The shapes that the table chooses by."""
        values, alignment = self.rows.values, 16
        if values is not None and (values.stride(0) % 16 or values.data_ptr() % 16):
            alignment = 1
        return Mixture(
            up=Matrix.of(self.up, self.order),
            down=Matrix.of(self.down, self.order),
            num_experts=self.num_experts,
            num_tokens=self.experts.shape[0],
            num_chosen=self.experts.shape[1],
            alignment=alignment,
            has_16_bits=self.rows.dtype.itemsize == 2,
        )

    def new_output(self, num_partials: int) -> Tensor:
        """Returns unfilled partials [T, P, H]."""
        return self.rows.new_empty(len(self.experts), num_partials, self.down.num_outputs)


def run_mixture(
    rows: Inputs,
    routing_weights: Tensor,
    experts: Tensor,
    up: Form,
    down: Form,
    *,
    limit: float = 0.0,
    order: SumOrder = SumOrder.FREE,
) -> Tensor | None:
    """Runs the kernel that the table chooses. Returns partials [T, P, H] in the rows' dtype, whose
    sums are each token's mixture of its experts; None if no kernel takes the shapes."""
    rows = as_activations(rows)
    if isinstance(up, Raw) and isinstance(down, Raw):
        check_rows(hidden=rows.values)
        check_contiguous(up=up.values, down=down.values, experts=experts)
    elif not _suits(rows, up, down):
        return None
    assert not isinstance(up, Packed), "a form of kernels"
    assert not isinstance(down, Packed), "a form of kernels"
    return run_chosen(RoutedRows(rows, routing_weights, experts, up, down, limit, order))


def _suits(rows: Activations, *weights: Form) -> bool:
    """Whether rows have 16 bits and are contiguous, and inputs are whole blocks."""
    is_whole = all(weight.num_inputs % BLOCK == 0 for weight in weights)
    are_contiguous = rows.values is None or rows.values.stride(-1) == 1
    return rows.dtype.itemsize == 2 and are_contiguous and is_whole


def run_chosen(routed: RoutedRows) -> Tensor:
    """Runs the kernel that the table chooses; returns partials [T, P, H]."""
    choice = EXPERTS.choose(routed.mixture, routed.chip)
    assert choice is not None, "the last row of a form serves all"
    partials: Tensor = choice.kernel.run(routed)
    return partials
