"""Weights of four bits: AWQ, GPTQ and compressed-tensors' pack-quantized layout, all converted to
one arrangement as they are loaded (see `kernels.products.forms.quantised.Int4`).

Legend: O outputs, I inputs, G groups of inputs, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.errors import UnsupportedModelError, WeightsError
from milepost.kernels.products.forms.quantised import BLOCK, Int4, lane_of, pack
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import Rows, WeightSlot, WeightSlots
from milepost.layers.weights import Precision, Weight, refuse_inputs
from milepost.parallel import Axes

_WORDS = ("I32",)
_EIGHT = torch.arange(8)
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Entry i gives the four bits of a word that hold number i of eight."""
_MIDDLE = 8
"""Zero point of symmetric weights."""
_SPREAD = 17.5**0.5
"""Standard deviation of dummy numbers: -7 to 7, with 0 twice as frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Precision(Precision):
    """The layout of a checkpoint's four-bit tensors."""

    layout: Literal["awq", "gptq", "packed"]
    group: int
    """Inputs that share a scale; -1 means all of them."""
    is_symmetric: bool
    zero_offset: int = 0
    """Offset added to a GPTQ checkpoint's zero points: version 1 stores one less."""
    has_order: bool = False
    """Whether a GPTQ or packed checkpoint may name each input's group."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tensor names that mark a projection as this form: it has at least one of them."""
        return ("weight_packed",) if self.layout == "packed" else ("qweight",)

    def stack(self, shape: tuple[int, ...], num_placed: int, scope: ModuleScope) -> Int4Matrix:
        return Int4Matrix(self, shape, num_placed, scope)

    @property
    def axes(self) -> dict[str, Axes]:
        """Axes of a projection's tensors. Ranks get whole words and groups."""
        across = int(self.layout == "packed")
        groups = None if self.group == -1 else (across, self.group)
        if across:
            return {
                "weight_packed": Axes((0, 1), (1, 8)),
                "weight_scale": Axes((0, 1), groups),
                "weight_zero_point": Axes((0, 8), groups),
                "weight_shape": Axes(None, None),
                "weight_g_idx": Axes(None, (0, 1)),
            }
        return {
            "qweight": Axes((1, 8), (0, 1)) if self.layout == "awq" else Axes((1, 1), (0, 8)),
            "scales": Axes((1, 1), groups),
            "qzeros": Axes((1, 8), groups),
            "g_idx": Axes(None, (0, 1)),
        }

    def group_of(self, num_inputs: int, num_placed: int, scope: ModuleScope) -> int:
        """Returns the number of inputs that share a scale, for a matrix whose projections have
        `num_placed` inputs. Raises UnsupportedModelError or ConfigError if groups do not fit."""
        group = num_inputs if self.group == -1 else self.group
        is_whole = self.group == -1 or num_placed % group == 0
        if not is_whole or num_inputs % group or num_inputs % (2 * lane_of(group)):
            why = f"are not whole pairs of groups of {group}"
            if self.group == -1:
                why = f"with group_size=-1, one scale for all, are no multiple of {BLOCK}"
            refuse_inputs(num_placed, why, scope)
        return group


class Int4Matrix(Weight):
    """Numbers [..., O, I / 2] with scales and zero points."""

    def __init__(
        self,
        precision: Int4Precision,
        shape: tuple[int, ...],
        num_placed: int,
        scope: ModuleScope,
    ) -> None:
        super().__init__()
        *stack, num_outputs, num_inputs = shape
        self.precision, self.scope, self.axes = precision, scope, precision.axes
        self.num_placed = num_placed
        self.group = precision.group_of(num_inputs, num_placed, scope)
        groups = (*stack, num_outputs, num_inputs // self.group)
        self.packed = scope.empty(*stack, num_outputs, num_inputs // 2, dtype=torch.uint8)
        self.scales = scope.ones(*groups, dtype=scope.dtype)
        self.zeros = scope.empty(*groups, dtype=torch.uint8)
        self.zeros.data.fill_(_MIDDLE)

    @property
    def form(self) -> Int4:
        return Int4(
            packed=self.packed,
            scales=self.scales,
            zeros=self.zeros,
            group=self.group,
            order=self.scope.order,
        )

    def place_projection(self, rows: Rows, at: tuple[int, ...], path: str) -> WeightSlots:
        if rows.count % 8:
            raise UnsupportedModelError(
                f"{path}: {rows.count} outputs are not whole words of eight"
            )
        is_packed = self.precision.layout == "packed"
        places = (self._place_packed if is_packed else self._place_transposed)(rows, at)
        if self.precision.has_order:
            name = "g_idx" if self.precision.layout == "gptq" else "weight_g_idx"
            if f"{path}.{name}" in self.scope.names:
                types = (*_WORDS, "I64")
                places[name] = WeightSlot((self.num_placed,), self._check_order, types=types)
        return places

    def _place_packed(self, rows: Rows, at: tuple[int, ...]) -> WeightSlots:
        """Places compressed-tensors' layout: words run along inputs, and numbers have an offset of
        eight."""
        count, inputs = rows.count, self.num_placed
        groups = -(-inputs // self.group)

        def store_numbers(words: Tensor) -> None:
            self._put_numbers(rows, at, split(words, -1))

        def store_zeros(words: Tensor) -> None:
            _put_first(rows, self.zeros.data[at], split(words, 0))

        places = {
            "weight_packed": WeightSlot((count, inputs // 8), store_numbers, types=_WORDS),
            "weight_scale": WeightSlot(
                (count, groups), partial(_put_first, rows, self.scales.data[at])
            ),
            "weight_shape": WeightSlot((2,), len, types=(*_WORDS, "I64")),
        }
        if not self.precision.is_symmetric:
            shape = count // 8, groups
            places["weight_zero_point"] = WeightSlot(shape, store_zeros, types=_WORDS)
        return places

    def _place_transposed(self, rows: Rows, at: tuple[int, ...]) -> WeightSlots:
        """Places layouts whose rows are inputs. Words run along outputs (AWQ, and all zero points)
        or inputs (GPTQ)."""
        count, inputs = rows.count, self.num_placed
        groups = -(-inputs // self.group)
        is_awq, offset = self.precision.layout == "awq", self.precision.zero_offset
        order = _AWQ_ORDER if is_awq else _EIGHT
        shape = (inputs, count // 8) if is_awq else (inputs // 8, count)

        def store_numbers(words: Tensor) -> None:
            self._put_numbers(rows, at, split(words, 1 if is_awq else 0, order).T)

        def store_scales(scales: Tensor) -> None:
            _put_first(rows, self.scales.data[at], scales.T)

        def store_zeros(words: Tensor) -> None:
            zeros = (split(words, 1, order).T + offset) & 15
            _put_first(rows, self.zeros.data[at], zeros)

        return {
            "qweight": WeightSlot(shape, store_numbers, types=_WORDS),
            "scales": WeightSlot((groups, count), store_scales),
            "qzeros": WeightSlot((groups, count // 8), store_zeros, types=_WORDS),
        }

    def _put_numbers(self, rows: Rows, at: tuple[int, ...], q: Tensor) -> None:
        """Writes a projection's numbers [n, I] into the matrix `at`."""
        packed = self.packed.data[at]
        padding = 2 * packed.shape[-1] - q.shape[-1]
        q = nn.functional.pad(q.to(packed.device), (0, padding), value=_MIDDLE)
        rows.put(packed, pack(q, lane_of(self.group)))

    def _check_order(self, order: Tensor) -> None:
        # With several ranks, a rank's first group need not be group 0.
        first = 0 if self.scope.ranks.is_alone else int(order[0])
        if not torch.equal(order.long().cpu(), torch.arange(self.num_placed) // self.group + first):
            raise WeightsError(
                "inputs are ordered by activation (desc_act, actorder); supported are groups in "
                "the inputs' own order"
            )

    def clear(self, first: int, count: int) -> None:
        """Sets numbers to their zero point."""
        self.packed.data[..., first : first + count, :] = _MIDDLE | _MIDDLE << 4
        self.zeros.data[..., first : first + count, :] = _MIDDLE

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills numbers evenly around the zero point. The mean of all sixteen values would lie half
        a step below it: every product would add the same direction, until all tokens choose the
        same experts."""
        packed = self.packed.data
        packed.random_(0, 256, generator=generator)
        packed |= (packed & 15 == 0).to(torch.uint8) * _MIDDLE
        packed |= (packed < 16).to(torch.uint8) * (_MIDDLE << 4)
        self.scales.data.fill_(spread / _SPREAD)


def _put_first(rows: Rows, matrix: Tensor, values: Tensor) -> None:
    """Writes a projection's scales or zero points [n, G] into the first columns of a matrix."""
    rows.put(matrix[:, : values.shape[-1]], values)


def split(words: Tensor, dim: int, order: Tensor = _EIGHT) -> Tensor:
    """Returns the eight four-bit numbers of each int32 word, as uint8 along `dim`. Number i is read
    from bit 4 * order[i] upwards."""
    dim = dim % words.dim()
    shifts = 4 * order.to(words.device)
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = 8
    numbers = words.unsqueeze(dim + 1) >> shifts.to(words.dtype).view(shape)
    return (numbers & 15).to(torch.uint8).flatten(dim, dim + 1)
