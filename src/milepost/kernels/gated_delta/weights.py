"""The small weights of a Gated DeltaNet layer's token mixer, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaWeights:
    """Legend: C channels, J taps, V value heads, W value_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[V] float32, negative: what softplus is multiplied by."""
    decay_bias: Tensor
    """[V] float32, added before softplus."""
    norm: Tensor
    """[W] float32."""
    norm_eps: float
    max_beta: float = 1.0
    """What the sigmoid of a beta is multiplied by."""
