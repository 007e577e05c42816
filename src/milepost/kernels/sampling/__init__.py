"""Sampling: greedy choices (`argmax`), guesses of draws (`guess`) and, in `draws`, draws on a GPU.
`runner.sampling` and `runner.sampler` say what is drawn, and `reference` defines the noise.

Torch's argmax defines `argmax`, and takes several times as long on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.platform.tables import fused
from milepost.kernels.sampling.rows import StepRows, Workspace

__all__ = ["StepRows", "Workspace", "argmax", "guess"]


@fused("sampling.likeliest")
def argmax(logits: Tensor) -> Tensor:
    """Returns the first of the greatest of each row of `logits` [R, V]: [R] int64."""
    return logits.argmax(dim=-1)


def guess(logits: Tensor, ints: Tensor, temperatures: Tensor, indices: Tensor) -> Tensor:
    """Guesses on a GPU what will be drawn from `logits` [R, V]: see `likeliest.guess`."""
    from milepost.kernels.sampling import likeliest

    return likeliest.guess(logits, ints, temperatures, indices)
