"""Operations of vision towers: patches of bytes to numbers, attention in both directions, and what
stands around it.

This is the door to the ops: callers import them from here, whatever computes them. `reference` is
the definition, on any device.
"""

from __future__ import annotations

from milepost.kernels.vision.reference import (
    add_norm,
    attend,
    interpolate,
    multiply_gelu,
    normalise,
    turned_angles,
)

__all__ = ["add_norm", "attend", "interpolate", "multiply_gelu", "normalise", "turned_angles"]
