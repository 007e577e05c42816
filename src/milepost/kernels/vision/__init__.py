"""Operations of vision towers: patches of bytes to numbers, attention in both directions, and what
stands around it.

Callers import the operations from here. `reference` is the definition, on any device; on a GPU
`attention`, `triton` and torch's GEMM compute them.
"""

from __future__ import annotations

from milepost.kernels.platform.tables import fused
from milepost.kernels.vision import reference
from milepost.kernels.vision.reference import (
    PictureFrames,
    add_averaged_positions,
    add_cropped_positions,
    turned_angles,
)

__all__ = [
    "PictureFrames",
    "add_averaged_positions",
    "add_cropped_positions",
    "add_norm",
    "add_positions",
    "attend",
    "multiply_gelu",
    "normalise",
    "turned_angles",
]

normalise = fused("vision.triton")(reference.normalise)
add_positions = fused("vision.triton")(reference.add_positions)
add_norm = fused("vision.triton")(reference.add_norm)
attend = fused("vision.attention")(reference.attend)
multiply_gelu = fused("vision.triton")(reference.multiply_gelu)
