"""Runs the kernel that `products.expert_table` chooses for routed experts on a GPU.

Each kernel's module has `run`, which takes `RoutedRows` and returns partials [T, P, H]: one for
each expert of a token, or one for all.

Legend: T tokens, H hidden size, X experts, N experts of a token, I an expert's size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.layout.emit import Activations, Inputs, as_activations, values_of
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.products.expert_table import EXPERTS, Mixture
from milepost.kernels.products.forms.matrix import Form, Matrix, Raw
from milepost.kernels.products.forms.quantised import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedRows:
    """Rows, the experts that each was routed to, and those experts' weights."""

    rows: Activations
    """[T, H], each row contiguous."""
    routing_weights: Tensor
    """[T, N]"""
    experts: Tensor
    """[T, N] int32; no token has an expert twice."""
    up: Form
    """[X, 2 * I, H], gates before ups, or [X, I, H] for experts that square a ReLU."""
    down: Form
    """[X, H, I]"""
    chip: Chip
    limit: float = 0.0
    """Limit of SwiGLU's factors: see `norm.silu_mul`. 0 if there is none."""

    @property
    def values(self) -> Tensor:
        """The rows in the model's dtype."""
        return values_of(self.rows)

    @property
    def num_routed(self) -> int:
        return self.experts.numel()

    @property
    def num_experts(self) -> int:
        weight = self.up.values if isinstance(self.up, Raw) else self.up.scales
        return len(weight)

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
            up=Matrix.of(self.up),
            down=Matrix.of(self.down),
            num_experts=self.num_experts,
            num_tokens=self.experts.shape[0],
            num_chosen=self.experts.shape[1],
            alignment=alignment,
            has_16_bits=self.rows.dtype.itemsize == 2,
        )

    def new_output(self, num_partials: int) -> Tensor:
        """Returns unfilled partials [T, P, H]."""
        return self.rows.new_empty(len(self.experts), num_partials, self.down.num_outputs)


def mix(
    rows: Inputs,
    routing_weights: Tensor,
    experts: Tensor,
    up: Form,
    down: Form,
    *,
    limit: float = 0.0,
) -> Tensor | None:
    """Returns partials [T, P, H] in the rows' dtype, which add up to each token's mix of its
    experts; None if no kernel takes the shapes."""
    rows = as_activations(rows)
    if isinstance(up, Raw) and isinstance(down, Raw):
        check_rows(hidden=rows.values)
        check_contiguous(up=up.values, down=down.values, experts=experts)
    elif not _suits(rows, up, down):
        return None
    routed = RoutedRows(
        rows=rows,
        routing_weights=routing_weights,
        experts=experts,
        up=up,
        down=down,
        chip=probe(rows.device),
        limit=limit,
    )
    return run_chosen(routed)


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
