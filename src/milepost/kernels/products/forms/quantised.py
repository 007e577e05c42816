"""Quantised matrices in plain torch: storage, rounding and products. This is the definition.

Four forms. `Fp8`: values in float8_e4m3fn, each scale for a block of them; activations are rounded
to the same type when they are multiplied, as the checkpoints' makers evaluate them (block scales:
DeepSeek-V3, arXiv 2412.19437, section 3.3.2). `Int8`: integers, one scale an output and one a row
of activations, which are rounded to integers too (LLM.int8, arXiv 2208.07339, section 2). `Int4`:
four bits a weight, a scale and a zero point for every group of a row's inputs (AWQ, arXiv
2306.00978; GPTQ, arXiv 2210.17323). `Fp4`: the four bits are a float, e2m1 (OCP Microscaling
Formats 1.0, section 5.3.3), a group's scale is one too, and a row has a factor. With four bits
activations stay as they are, also where a checkpoint was made for chips that round them to four
bits as well.

Legend: O outputs, I inputs, T tokens; any leading dimensions (experts).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import BLOCK as BLOCK
from milepost.kernels.platform.tensors import FP8 as FP8
from milepost.kernels.platform.tensors import FP8_MAX as FP8_MAX
from milepost.kernels.platform.tensors import (
    INT8_MAX,
    LEAST_SCALE,
    accumulation_dtype,
    round_fp8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Weights with one number per element."""

    values: Tensor
    """[..., O, I], contiguous."""
    order: SumOrder = SumOrder.FREE
    """Order of sums that every product with them needs; a product may ask for a stricter one."""

    @property
    def num_inputs(self) -> int:
        return self.values.shape[-1]

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8(Values):
    """Weights W[o, i] = values[o, i] * scales[o // rows, i // depth], values in float8_e4m3fn."""

    scales: Tensor
    """[..., ceil(O / rows), ceil(I / depth)] float32, contiguous."""
    rows: int
    """Outputs that share a scale: BLOCK or 1."""
    depth: int
    """Inputs that share a scale: BLOCK, or all. Activations share scales alike."""
    input_scale: Tensor | None = None
    """[...] float32: the scale of all activations, where the checkpoint sets it."""

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights [..., O, I]."""
        num_outputs, num_inputs = self.values.shape[-2:]
        scales = self.scales.repeat_interleave(self.rows, -2)[..., :num_outputs, :]
        scales = scales.repeat_interleave(self.depth, -1)[..., :num_inputs]
        return (self.values.to(torch.float32) * scales).to(dtype)

    def round_inputs(self, hidden: Tensor) -> Tensor:
        """Returns `hidden` [T, I] rounded to FP8 and scaled back, in float32."""
        values, scales = quantise_rows(hidden, self.depth, self.input_scale)
        scales = scales.repeat_interleave(self.depth, -1)[:, : hidden.shape[-1]]
        return values.to(torch.float32) * scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(Values):
    """Weights W[o, i] = values[o, i] * scales[o], values in int8. Sums of products of integers are
    exact, whatever their order."""

    scales: Tensor
    """[..., O, 1] float32, contiguous."""
    input_scale: Tensor | None = None
    """[...] float32: the scale of all activations, where the checkpoint sets it. Otherwise each row
    has one."""

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights [..., O, I]."""
        return (self.values.to(torch.float32) * self.scales).to(dtype)

    def multiply(self, hidden: Tensor) -> Tensor:
        """Multiplies `hidden` [T, I], rounded, by the transposed weights [O, I]: [T, O] float64."""
        rows, scales = quantise_int8(hidden, self.input_scale)
        if rows.device.type == "cpu":
            sums = torch._int_mm(rows, self.values.T)
        else:
            # On a GPU torch takes few shapes of integers; float64 holds such sums exactly.
            sums = rows.to(torch.float64) @ self.values.to(torch.float64).T
        return sums.to(torch.float64) * scales * self.scales.T


@dataclass(frozen=True, slots=True, kw_only=True)
class Nibbles:
    """Weights of four bits, two per byte. Activations are not rounded."""

    packed: Tensor
    """[..., O, J / 2] uint8, where J is I, or I rounded up."""
    group: int
    """Inputs that share a scale."""
    order: SumOrder = SumOrder.FREE
    """See `Values`."""

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[-2]

    def round_inputs(self, hidden: Tensor) -> Tensor:
        """Returns the rows unchanged."""
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4(Nibbles):
    """Weights W[o, i] = (q[o, i] - zeros[o, i // group]) * scales[o, i // group].

    Inputs 2 * L * b + j and 2 * L * b + L + j, where L is `lane` and j < L, share byte L * b + j of
    a row: the first is its low half. So a kernel that reads L bytes has 2 * L inputs in two pieces
    of one scale each. Groups are of 32 or 64 inputs or whole blocks: kernels load the scales of a
    block as those of one group, of two halves or of four quarters.
    """

    scales: Tensor
    """[..., O, I / group] in the model's type."""
    zeros: Tensor
    """[..., O, I / group] uint8."""

    def __post_init__(self) -> None:
        is_known = self.group in (32, 64) or self.group % BLOCK == 0
        assert is_known, f"groups of {self.group} inputs: no quarters, halves or whole blocks"

    @property
    def lane(self) -> int:
        return lane_of(self.group)

    @property
    def num_inputs(self) -> int:
        return 2 * self.packed.shape[-1]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights [..., O, I]."""
        q = unpack(self.packed, self.lane)
        zeros = self.zeros.repeat_interleave(self.group, -1)
        scales = self.scales.to(torch.float32).repeat_interleave(self.group, -1)
        return ((q.to(torch.float32) - zeros) * scales).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4(Nibbles):
    """Weights W[o, i] = e2m1(q[o, i]) * scales[o, i // group] * factors[o]: NVFP4 with groups of 16
    (arXiv 2509.25149, section 2), MXFP4 with groups of 32.

    A number of a row's scale has six significant bits, so it is exact in 16-bit types; factors are
    multiplied with the sum. Numbers share bytes as those of `Int4` do; J inputs are whole blocks,
    those beyond I are zeros.
    """

    scales: Tensor
    """[..., O, J / group] float8_e4m3fn."""
    factors: Tensor
    """[..., O] float32."""
    num_inputs: int

    @property
    def lane(self) -> int:
        return FP4_LANE

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights [..., O, I]."""
        numbers = widen_e2m1(unpack(self.packed, self.lane))
        scales = self.scales.to(torch.float32).repeat_interleave(self.group, -1)
        weights = numbers * scales * self.factors[..., None]
        return weights[..., : self.num_inputs].to(dtype)


FourBits = Int4 | Fp4
Quantised = Fp8 | Int8 | FourBits

FP4_LANE = 64
"""Inputs of one piece of a packed row of `Fp4`; it has several scales."""


def nth(stack: Quantised, index: int) -> Quantised:
    """Returns one matrix of a stack."""
    values = {each.name: getattr(stack, each.name) for each in fields(stack)}
    own: dict[str, Any] = {
        k: v[index] for k, v in values.items() if isinstance(v, Tensor) and v.dim()
    }
    return replace(stack, **own)


def widen_e2m1(q: Tensor) -> Tensor:
    """Decodes e2m1 numbers in uint8 (a sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5,
    2, 3, 4 and 6) to float32. Uses no table, since a captured step could not copy one to the
    device."""
    size = q & 7
    quarters = torch.where(size < 2, size * 2, (2 + (size & 1)) << (size >> 1))
    return torch.where(q < 8, 0.25, -0.25) * quarters


def lane_of(group: int) -> int:
    """Returns the inputs of one piece of a packed row (see `Int4`): a group, or a whole share of
    one."""
    return min(group, 64)


def pack(q: Tensor, lane: int) -> Tensor:
    """Packs four-bit numbers [..., I] uint8 as in `Int4.packed`; I is a multiple of 2 * lane."""
    pieces = q.unflatten(-1, (-1, 2, lane))
    packed: Tensor = pieces[..., 0, :] | pieces[..., 1, :] << 4
    return packed.flatten(-2)


def unpack(packed: Tensor, lane: int) -> Tensor:
    """Inverts `pack`."""
    pieces = packed.unflatten(-1, (-1, lane))
    return torch.stack((pieces & 15, pieces >> 4), -2).flatten(-3)


def quantise_rows(
    hidden: Tensor, depth: int, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rounds activations [T, I]: values [T, I] float8_e4m3fn and float32 scales [T, ceil(I /
    depth)], which are made for each `depth` inputs of a row, or are all `input_scale` []."""
    num_inputs = hidden.shape[-1]
    count = -(-num_inputs // depth)
    rows = hidden.to(torch.float32)
    padded = torch.nn.functional.pad(rows, (0, count * depth - num_inputs))
    blocks = padded.unflatten(-1, (count, depth))
    if input_scale is None:
        scales = (blocks.abs().amax(-1) / FP8_MAX).clamp(min=LEAST_SCALE)
    else:
        scales = input_scale.to(torch.float32).expand(blocks.shape[:-1]).contiguous()
    values = round_fp8(blocks / scales[..., None])
    return values.flatten(-2)[..., :num_inputs].contiguous(), scales


def quantise_int8(hidden: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rounds activations [T, I] to integers, ties to even: values [T, I] int8 and float32 scales
    [T, 1]. A row's largest number becomes 127, unless the scale of all rows is `input_scale` []."""
    rows = hidden.to(torch.float32)
    if input_scale is None:
        scales = (rows.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=LEAST_SCALE)
        numbers = rows * (1 / scales)
    else:
        scales = input_scale.to(torch.float32).expand(len(rows), 1).contiguous()
        numbers = rows / scales
    return numbers.clamp(-128, 127).round().to(torch.int8), scales


def quantise_fp8(weights: Tensor, rows: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Returns the `values` and `scales` of an `Fp8` with a depth of BLOCK, for raw weights [O,
    I]."""
    num_outputs, num_inputs = weights.shape
    down, across = -(-num_outputs // rows), -(-num_inputs // BLOCK)
    pads = (0, across * BLOCK - num_inputs, 0, down * rows - num_outputs)
    padded = torch.nn.functional.pad(weights.to(torch.float32), pads)
    blocks = padded.view(down, rows, across, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp(min=LEAST_SCALE)
    values = (blocks / scales[:, None, :, None]).to(FP8).view(down * rows, across * BLOCK)
    return values[:num_outputs, :num_inputs].contiguous(), scales


def multiply(hidden: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """Multiplies `hidden` [T, I] by the transposed `weight` [O, I] and adds `bias` [O]: [T, O],
    with sums in the type that sums are kept in."""
    dtype = accumulation_dtype(hidden.dtype)
    if isinstance(weight, Int8):
        product = weight.multiply(hidden).to(dtype)
    else:
        product = weight.round_inputs(hidden).to(dtype) @ weight.dequantise(dtype).T
    if bias is not None:
        product += bias
    return product.to(hidden.dtype)
