"""The small weights of token mixers, as kernels take them, and what the projections of one hand
over.

Legend: T tokens, C channels, J taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaWeights:
    """A Gated DeltaNet layer's. Legend: V value heads, W value_dim."""

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
    """Factor of a beta's sigmoid."""
    gates_by_sigmoid: bool = False
    """Whether outputs are multiplied by the sigmoid of their gate, not by its SiLU; Hopper's own
    kernels know SiLU alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAWeights:
    """A KDA layer's. Legend: C = 3 * H * K channels, H heads, K head_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[H] float32, negative: what softplus is multiplied by."""
    decay_bias: Tensor
    """[H * K] float32, added before softplus."""
    norm: Tensor
    """[K] float32."""
    norm_eps: float
    least_decay: float = 0.0
    """If it is not 0, a log decay is this number times the sigmoid of the input times -rate, not
    the rate times the input's softplus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Weights:
    """A Mamba2 layer's. Legend: H heads, P head_dim."""

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
    batch_invariant: bool = False
    """Whether kernels are cut alike for any number of sequences."""


Weights = GatedDeltaWeights | KDAWeights | Mamba2Weights


class KDAProjected(NamedTuple):
    """Outputs of KDA's projections. Legend: H heads, K head_dim."""

    rows: Tensor
    """[T, C + H]: queries, keys, values (the C channels), heads side by side, and betas before
    their sigmoid."""
    decays: Tensor
    """[T, H * K]: what log decays are made of. Its rows may lie apart."""
    gate: Tensor
    """[T, H * K], likewise: what the output's gate is the sigmoid of."""


MixerProjections = Tensor | KDAProjected
"""Gated DeltaNet's rows [T, C + V * W + 2 * V] hold queries, keys, values (the C channels), output
gates, betas [V] before their sigmoid and decay inputs [V], heads side by side; Mamba2's [T, H * P +
C + H] gates, x, B, C (the C channels) and time steps."""
