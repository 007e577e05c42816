"""A weight is an object that can multiply: raw values here; others keep theirs quantised, or a
rank's part of them.

A `Precision` makes weights of one form. Each weight has a place for every tensor that its form has
in a checkpoint (values, scales ...), under the projection's name. Layers ask for weights and
multiply; which form they have is none of their business. Projections of equal precision share a
matrix.

Legend: T tokens, I inputs, O outputs, X experts, N experts for each token, P split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from milepost.kernels import linear, moe, norm
from milepost.layers.placements import (
    Placements,
    fill_matrix,
    place_rows,
    place_scattered,
    place_whole,
)

if TYPE_CHECKING:
    from milepost.layers.parameters import ParameterKind

_PROJECTIONS = "gate_proj", "up_proj", "down_proj"
_PACKED_ROWS = 16
"""Rows of the products that a packed weight is arranged for; others are right too."""


class Weight(Protocol):
    """A matrix of O rows and I columns; a module."""

    def multiply(self, hidden: Tensor, bias: Tensor | None, *, lets_next_start: bool) -> Tensor:
        """`hidden` [T, I] to [T, O]: see `linear.multiply`."""
        ...

    def partials(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """The same, or partials [T, P, O] of it: see `linear.partials`."""
        ...

    def multiply_precise(self, hidden: Tensor) -> Tensor:
        """Unrounded: see `linear.multiply_precise`."""
        ...

    def multiply_gated(self, hidden: Tensor) -> Tensor:
        """SiLU of the first half of the outputs times the other half: [T, O / 2]."""
        ...

    def place(self, rows: Tensor) -> Placements:
        """A projection's tensors, by their names in it; its output i is row `rows[i]`."""
        ...

    def clear(self, first: int, count: int) -> None:
        """Set rows to zero that belong to no projection."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fill it with dummy values."""
        ...

    def pack(self) -> None:
        """Arrange the filled weight for small batches on a CPU, where that pays. No placement can
        be made afterwards."""
        ...


class Experts(Protocol):
    """Matrices of X experts; a module."""

    def mix(self, hidden: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """`hidden` [T, I] through each token's `experts` [T, N], times their `shares`, in partials
        [T, P, I]: see `moe.partials`."""
        ...

    def placements(self) -> Placements:
        """By full names."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fill them with dummy values."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Experts of a mixture, as they stand in memory and in the checkpoint."""

    hidden_size: int
    size: int
    """Units of an expert."""
    names: tuple[str, ...]
    """Of each expert, where the checkpoint has them one by one."""
    num_stacked: int
    """The first so many may be one tensor in the checkpoint, named `experts`."""
    projections: tuple[str, str, str] = _PROJECTIONS
    """Of those that are routed; a shared expert's have the usual names."""


class Precision(Protocol):
    """A form of weights; hashable."""

    def matrix(self, num_outputs: int, num_inputs: int, kind: ParameterKind) -> Weight:
        """An unfilled matrix for one or several projections."""
        ...

    def experts(self, sizes: ExpertSizes, kind: ParameterKind) -> Experts:
        """Unfilled matrices of a mixture's experts."""
        ...


@dataclass(frozen=True, slots=True)
class Raw:
    """Weights in the model's type."""

    def matrix(self, num_outputs: int, num_inputs: int, kind: ParameterKind) -> Weight:
        return RawWeight(kind.empty(num_outputs, num_inputs))

    def experts(self, sizes: ExpertSizes, kind: ParameterKind) -> Experts:
        return RawExperts(sizes, kind)


RAW = Raw()


class RawWeight(nn.Module):
    """`values` [O, I] as they are; they may be an embedding's too."""

    def __init__(self, values: nn.Parameter) -> None:
        super().__init__()
        self.values: nn.Parameter | None = values
        self._packed: Tensor | None = None

    def multiply(self, hidden: Tensor, bias: Tensor | None, *, lets_next_start: bool) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, bias, "none", [], "")
        return linear.multiply(hidden, self.values, bias, lets_next_start=lets_next_start)

    def partials(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            return self.multiply(hidden, bias, lets_next_start=True)
        return linear.partials(hidden, self.values, bias)

    def multiply_precise(self, hidden: Tensor) -> Tensor:
        if self._packed is not None:
            return self.multiply(hidden, None, lets_next_start=True)
        return linear.multiply_precise(hidden, self.values)

    def multiply_gated(self, hidden: Tensor) -> Tensor:
        if self._packed is not None:
            return norm.silu_mul(self.multiply(hidden, None, lets_next_start=True))
        return linear.multiply_gated(hidden, self.values)

    def place(self, rows: Tensor) -> Placements:
        return {"weight": place_scattered(self._unpacked(), rows)}

    def clear(self, first: int, count: int) -> None:
        self._unpacked()[first : first + count].zero_()

    def fill(self, spread: float, generator: torch.Generator) -> None:
        fill_matrix(self._unpacked(), spread, generator)

    def pack(self) -> None:
        """For float32 on a CPU whose torch has oneDNN; does nothing to any other. With 16 rows a
        product costs 0.5 to 0.9 of what it did."""
        if self.values is None or self.values.device.type != "cpu":
            return
        if torch.backends.mkldnn.is_available() and self.values.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.values.data, _PACKED_ROWS)
            self.values = None

    def _unpacked(self) -> Tensor:
        assert self.values is not None, "what is packed is not changed any more"
        return self.values


class RawExperts(nn.Module):
    """Each expert's gate and up projection stand in one matrix."""

    def __init__(self, sizes: ExpertSizes, kind: ParameterKind) -> None:
        super().__init__()
        self.sizes, self.kind = sizes, kind
        num_experts = len(sizes.names)
        self.gate_up = kind.empty(num_experts, 2 * sizes.size, sizes.hidden_size)
        self.down = kind.empty(num_experts, sizes.hidden_size, sizes.size)

    def mix(self, hidden: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        return moe.partials(hidden, shares, experts, self.gate_up, self.down)

    def placements(self) -> Placements:
        sizes, kind = self.sizes, self.kind
        placements, single = {}, enumerate(sizes.names)
        if kind.has("experts.gate_up_proj"):
            placements = {
                kind.full("experts.gate_up_proj"): place_rows(self.gate_up, 0, sizes.num_stacked),
                kind.full("experts.down_proj"): place_rows(self.down, 0, sizes.num_stacked),
            }
            single = list(enumerate(sizes.names))[sizes.num_stacked :]
        for expert, name in single:
            gate_up, prefix = self.gate_up[expert], kind.full(name)
            is_stacked = expert < sizes.num_stacked
            gate, up, down = sizes.projections if is_stacked else _PROJECTIONS
            placements[f"{prefix}.{gate}.weight"] = place_rows(gate_up, 0, sizes.size)
            placements[f"{prefix}.{up}.weight"] = place_rows(gate_up, sizes.size, sizes.size)
            placements[f"{prefix}.{down}.weight"] = place_whole(self.down[expert])
        return placements

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in (self.gate_up, self.down):
            fill_matrix(weight, spread, generator)
