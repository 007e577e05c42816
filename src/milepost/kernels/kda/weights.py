"""The small weights of a KDA layer's token mixer, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAWeights:
    """Legend: C = 3 * H * K channels, J taps, H heads, K head_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[H] float32, negative: what softplus is multiplied by."""
    decay_bias: Tensor
    """[H * K] float32, added before softplus."""
    norm: Tensor
    """[K] float32."""
    norm_eps: float
