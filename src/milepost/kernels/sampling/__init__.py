"""Sampling: greedy choices (`argmax`), guesses of draws (`guess`) and draws on a GPU (`draw`).
`runner.sampling` and `runner.sampler` say what is drawn, and `reference` defines the noise.

Torch's argmax defines `argmax`, and takes several times as long on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.platform.device import runs_triton
from milepost.kernels.sampling.rows import StepRows, Workspace

__all__ = ["StepRows", "Workspace", "argmax", "draw", "guess"]


def argmax(logits: Tensor) -> Tensor:
    """Returns the first of the greatest of each row of `logits` [R, V]: [R] int64."""
    if not runs_triton(logits):
        return logits.argmax(dim=-1)
    from milepost.kernels.sampling import likeliest

    return likeliest.argmax(logits)


def guess(logits: Tensor, ints: Tensor, temperatures: Tensor, indices: Tensor) -> Tensor:
    """Guesses on a GPU what will be drawn from `logits` [R, V]: see `likeliest.guess`."""
    from milepost.kernels.sampling import likeliest

    return likeliest.guess(logits, ints, temperatures, indices)


def draw(
    logits: Tensor, best: Tensor, counts: Tensor, rows: StepRows, work: Workspace, *, searches: bool
) -> Tensor:
    """Draws on a GPU from `logits` [R, V]: see `draws.draw`."""
    from milepost.kernels.sampling import draws

    return draws.draw(logits, best, counts, rows, work, searches=searches)
