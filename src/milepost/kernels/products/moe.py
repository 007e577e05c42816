"""Routed experts: `route` chooses them for each token, `partials` runs them, `apply` adds up too.

This is the door to the operation: callers import it from here, whatever computes it.
`experts_reference` is the definition; on a GPU `routing` and `run_experts` compute it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.platform.device import runs_triton
from milepost.kernels.products import experts_reference as reference
from milepost.kernels.products.experts_reference import SOFTMAX, Scores
from milepost.kernels.products.forms.matrix import Raw

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
    choose = reference.route
    if runs_triton(logits):
        # Triton is imported where it is used: machines without a GPU need not have it.
        from milepost.kernels.products.routing import route as choose
    return choose(
        logits,
        num_chosen,
        normalise=normalise,
        num_shared=num_shared,
        scores=scores,
        bias=bias,
        dtype=dtype,
        num_real=num_real,
    )


def partials(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Returns partials [T, P, H] that add up to what `apply` returns, as many as suit the device.

    Adding them up costs whoever reads the output next less than a pass of its own would.
    """
    if not runs_triton(hidden):
        return reference.partials(hidden, weights, experts, gate_up, down)
    from milepost.kernels.products import run_experts

    up, last = Raw(values=gate_up), Raw(values=down)
    mixed = run_experts.mix(hidden, weights, experts, up, last)
    assert mixed is not None, "raw experts always have a kernel"
    return mixed


def apply(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """See `reference.apply`."""
    mixed = partials(hidden, weights, experts, gate_up, down)
    return mixed.squeeze(1) if mixed.shape[1] == 1 else mixed.sum(1)
