"""Small weights of token mixers, and the outputs of their input projections.

Legend: T tokens, C channels, J taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from milepost.kernels.platform.tables import SumOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaWeights:
    """Small weights of a Gated DeltaNet layer. Legend: V value heads, W value_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[V] float32, negative: the factor of softplus in a log decay."""
    decay_bias: Tensor
    """[V] float32, added before softplus."""
    norm: Tensor
    """[W] float32."""
    norm_eps: float
    max_beta: float = 1.0
    """Factor of a beta's sigmoid."""
    gates_by_sigmoid: bool = False
    """Whether outputs are multiplied by the gate's sigmoid instead of its SiLU. The Hopper kernels
    support SiLU only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAWeights:
    """Small weights of a KDA layer. Legend: C = 3 * H * K channels, H heads, K head_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[H] float32, negative: the factor of softplus in a log decay."""
    decay_bias: Tensor
    """[H * K] float32, added before softplus."""
    norm: Tensor
    """[K] float32."""
    norm_eps: float
    least_decay: float = 0.0
    """Lower bound of log decays, 0 for none. With a bound a log decay is bound * sigmoid(-rate *
    input), without one rate * softplus(input)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Weights:
    """Small weights of a Mamba2 layer. Legend: H heads, P head_dim."""

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
    """[H * P] float32. If None, outputs are gated but not normed."""
    norm_eps: float
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of time steps."""
    order: SumOrder = SumOrder.FREE
    """If FIXED, tiles do not depend on the number of sequences."""


Weights = GatedDeltaWeights | KDAWeights | Mamba2Weights


class KDAProjected(NamedTuple):
    """Outputs of KDA's projections. Legend: H heads, K head_dim."""

    rows: Tensor
    """[T, C + H]: queries, keys, values (the C channels), heads side by side, and betas before
    their sigmoid."""
    decays: Tensor
    """[T, H * K], inputs of log decays; rows may lie apart."""
    gate: Tensor
    """[T, H * K], the output's gate before its sigmoid; rows may lie apart."""


MixerProjections = Tensor | KDAProjected
"""Outputs of a mixer's input projections, heads side by side. Gated DeltaNet [T, C + V * W + 2 *
V]: queries, keys and values (the C channels), output gates, betas [V] before their sigmoid, decay
inputs [V]. Mamba2 [T, H * P + C + H]: gates, then x, B and C (the C channels), time steps."""
