"""Routed experts: `route` chooses them for each token, `partials` runs them, `apply` adds up too.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition; on a GPU `triton` computes it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from milepost.kernels.platform.device import runs_triton
from milepost.kernels.products import experts_reference as reference
from milepost.kernels.products.scores import SOFTMAX, Scores

__all__ = ["SOFTMAX", "Scores", "apply", "partials", "route"]


def route(
    logits: Tensor,
    num_chosen: int,
    *,
    normalise: bool,
    num_shared: int = 0,
    scores: Scores = SOFTMAX,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.route`; the experts' integer type is the device's choice."""
    how = {"normalise": normalise, "num_shared": num_shared, "dtype": dtype, "num_real": num_real}
    return _module(logits).route(logits, num_chosen, scores=scores, bias=bias, **how)


def partials(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """What `apply` returns in partials [T, P, H] that add up to it, as many as suit the device.

    Whoever reads the output next adds them up for less than a pass of its own would cost.
    """
    return _module(hidden).partials(hidden, weights, experts, gate_up, down)


def apply(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """See `reference.apply`."""
    mixed = partials(hidden, weights, experts, gate_up, down)
    return mixed.squeeze(1) if mixed.shape[1] == 1 else mixed.sum(1)


def _module(tensor: Tensor) -> ModuleType:
    """Triton is imported where it is used: machines without a GPU need not have it."""
    if runs_triton(tensor):
        from milepost.kernels.products import run_raw_experts as triton

        return triton
    return reference
