"""The small weights of a Mamba2 layer's token mixer, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Weights:
    """Legend: C channels, J taps, H heads, P head_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    conv_bias: Tensor | None
    """[C], likewise."""
    rate: Tensor
    """[H] float32, negative: the published A."""
    dt_bias: Tensor
    """[H] float32, added before softplus."""
    skip: Tensor
    """[H] float32: the published D."""
    norm: Tensor | None
    """[H * P] float32; None: outputs are gated and not normed."""
    norm_eps: float
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Least and most that a time step may be."""
