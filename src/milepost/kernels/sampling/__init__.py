"""Sampling: `argmax`, the door to greedy choices, and `guess`, that to drafts; `reference` defines
a draw, and `triton_draw` makes draws on a GPU (`runner.sampling` and `runner.sampler` say of what).

Torch's argmax is the definition of `argmax`, and takes several times as long on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.platform.device import runs_triton


def argmax(logits: Tensor) -> Tensor:
    """The greatest of each row of `logits` [R, V], of equal ones the first: [R] int64."""
    if not runs_triton(logits):
        return logits.argmax(dim=-1)
    from milepost.kernels.sampling import triton

    return triton.argmax(logits)


def guess(logits: Tensor, ints: Tensor, temperatures: Tensor, indices: Tensor) -> Tensor:
    """What will probably be drawn from `logits` [R, V], on a GPU: see `triton_guess`."""
    from milepost.kernels.sampling import triton_guess

    return triton_guess.guess(logits, ints, temperatures, indices)
