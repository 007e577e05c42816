"""Matrices of four-bit floats whose activations are rounded to four-bit floats too, in plain torch:
NVFP4 (arXiv 2509.25149, section 2) and MXFP4 (OCP Microscaling Formats 1.0, section 6.3). This is
the definition.

Legend: O outputs, I inputs, T tokens, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.platform.tensors import FP8, FP8_MAX
from milepost.kernels.products.forms.quantised import Fp4, widen_e2m1

E2M1_MAX = 6.0
PAIR = 1
"""Distance of two inputs in one byte, as chips read them that multiply e2m1."""
_MIDPOINTS = 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0
"""Numbers between two neighbours of e2m1. Each second one is rounded up, to an even code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A4(Fp4):
    """Weights as `Fp4` has them, but inputs 2 * j and 2 * j + 1 share byte j. Activations are
    rounded to e2m1 in groups of as many inputs as the weights'."""

    input_factor: Tensor
    """[] float32: factor of all scales of activations, those of all experts too. 1 for groups of
    32."""

    @property
    def lane(self) -> int:
        return PAIR

    def round_inputs(self, hidden: Tensor) -> Tensor:
        """Returns `hidden` [T, I] rounded to e2m1 and scaled back, in float32."""
        q, scales = round_e2m1(hidden, self.group, self.input_factor)
        return widen_e2m1(q) * scales.repeat_interleave(self.group, -1)


def round_e2m1(hidden: Tensor, group: int, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds activations [T, I] in groups: codes [T, I] uint8, and scales [T, G] float32 with the
    `factor` [].

    In groups of 16 the scale is a sixth of the largest number, rounded to float8 as a multiple of
    `factor`. In groups of 32 it is the power of two that is a quarter of the largest number, which
    is rounded to e2m1's precision before. Numbers beyond 6 scales saturate. A group with a NaN has
    the scale NaN; a group of zeros, or of numbers too small for a scale, has codes 0.
    """
    groups = hidden.to(torch.float32).unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1)
    if group == 16:
        scales = (largest / (E2M1_MAX * factor)).clamp(max=FP8_MAX).to(FP8).to(torch.float32)
        scales *= factor
    else:
        scales = largest.where(largest.isnan(), torch.exp2(exponents(largest) - 127.0))
    inverse = torch.where(scales > 0, 1 / scales, 0)[..., None]
    return encode_e2m1(groups * inverse).flatten(-2), scales


def exponents(largest: Tensor) -> Tensor:
    """Returns the scales of groups with these `largest` numbers, as e8m0 has them: exponents of two
    plus 127. Half a unit of e2m1's mantissa is added first, and 2 is the exponent of 4."""
    return ((largest.view(torch.int32) + (1 << 21) >> 23) - 2).clamp(min=1)


def encode_e2m1(numbers: Tensor) -> Tensor:
    """Rounds to e2m1, ties to even: codes in uint8. Zeros keep their sign, NaN becomes a zero."""
    size = numbers.abs()
    codes = torch.signbit(numbers).to(torch.uint8) * 8
    for index, bound in enumerate(_MIDPOINTS):
        codes += size >= bound if index % 2 else size > bound
    return codes
