"""Norms and activations in plain torch: the definition, on any device.

Legend: T tokens, H hidden size or heads, P parts, I size of a feed-forward layer, V value_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import cast


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float = 1.0,
    *,
    delta_scale: Tensor | None = None,
    emit: Emit = Emit.VALUES,  # noqa: ARG001
    order: SumOrder = SumOrder.FREE,  # noqa: ARG001
) -> tuple[Tensor, Inputs]:
    """Adds a layer's output, times `multiplier`, to the residual stream and norms the sum. Returns
    the sum and the norm, both [T, H] in `hidden`'s dtype.

    `hidden` [T, H]; `delta` [T, H], or [T, P, H] whose parts are added up, or None. The norm is the
    root mean square one with `scale` [H], computed in `scale`'s type. With `delta_scale` [H], the
    delta is normed itself before it is added. Kernels emit the norm as `emit` asks, and add a row
    up in `order`; partials have no order of many rows.
    """
    if delta is not None:
        delta = delta if delta.dim() == 2 else _add_up(delta)
        delta = delta if delta_scale is None else norm(delta, delta_scale, eps)
        hidden = hidden + (delta if multiplier == 1 else delta * multiplier)
    return hidden, norm(hidden, scale, eps)


def norm(rows: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Returns the root mean square norm of `rows` [..., H], computed in `scale`'s type."""
    wide = cast(rows, scale.dtype)
    return cast(F.rms_norm(wide, wide.shape[-1:], eps=eps).mul_(scale), rows.dtype)


def silu_mul(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """Returns SiLU of the first half of the columns times the second half: [T, 2 * I] to [T, I]. A
    `limit` bounds the SiLU from above, and the second half on both sides of zero."""
    gate, up = gate_up.chunk(2, -1)
    if limit:
        return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))
    return F.silu(gate).mul_(up)


def relu_squared(hidden: Tensor) -> Tensor:
    """Returns the square of the ReLU, [T, I]."""
    return F.relu(hidden).square_()


def gate_heads(hidden: Tensor, gate: Tensor) -> Tensor:
    """Multiplies heads [T, H, V] by the sigmoid of `gate` [T, H], in place."""
    return hidden.mul_(gate.sigmoid()[..., None])


def _add_up(parts: Tensor) -> Tensor:
    return parts.squeeze(1) if parts.shape[1] == 1 else parts.sum(1)
