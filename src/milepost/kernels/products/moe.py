"""Chooses routed experts: `route` is the door to the operation, whatever computes it.

`experts_reference` is the definition; on a GPU `routing` computes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tensors import in_blocks
from milepost.kernels.products import experts_reference
from milepost.kernels.products.experts_reference import SOFTMAX, Scores

__all__ = ["SOFTMAX", "Scores", "route"]


def route(
    logits: Tensor, num_chosen: int, *, batch_invariant: bool = False, **how: Any
) -> tuple[Tensor, Tensor]:
    """Routes as `experts_reference.route`, with its arguments; the experts' integer type is the
    device's choice."""
    if not runs_triton(logits):
        define = partial(experts_reference.route, num_chosen=num_chosen, **how)
        return in_blocks(define, logits) if batch_invariant else define(logits)
    # Triton is imported where it is used: machines without a GPU need not have it.
    from milepost.kernels.products import routing

    return routing.route(logits, num_chosen, **how)
