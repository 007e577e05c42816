"""A token mixer: its rule and sizes, a layer's small weights, and the outputs of its projections.

Nothing here needs a GPU, or Triton.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor

from milepost.kernels.platform.tensors import next_power_of_2


class RecurrentRule(StrEnum):
    """The rule by which a token changes a state."""

    GATED_DELTA = "gated_delta"
    KDA = "kda"
    MAMBA2 = "mamba2"


class MixerSizes(NamedTuple):
    """The rule, shape and options of a mixer; a constant on the device. Properties must depend on
    fields alone, since Triton's cache knows only those (and does not notice another formula).

    A *unit* is a group of heads that share a key and a query (or B and C) and finish together: a
    key head with its value heads, a KDA head, a Mamba2 group.
    """

    rule: RecurrentRule
    units: int
    """Key heads, or groups."""
    group: int
    """Heads of a unit."""
    shared: int
    """K: entries of the shared vectors."""
    own: int
    """W: entries of a head's value and output."""
    taps: int
    """J: taps of the convolution."""
    max_beta: float = 1.0
    """Factor of the sigmoid of the delta rule's betas."""
    least_decay: float = 0.0
    """Lower bound of KDA's log decays, 0 for none. With a bound a log decay is bound *
    sigmoid(-rate * input), without one rate * softplus(input)."""
    gates_by_sigmoid: bool = False
    """Whether outputs are multiplied by the gate's sigmoid instead of its SiLU."""
    gates_first: bool = False
    """Whether heads are gated before they are normed."""

    @property
    def norms_heads(self) -> bool:
        """Whether heads are normed one by one and queries and keys are unit vectors (the delta
        rule); else the heads of a unit are normed together."""
        return self.rule != RecurrentRule.MAMBA2

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a key decays by itself."""
        return self.rule == RecurrentRule.KDA

    @property
    def heads(self) -> int:
        return self.units * self.group

    @property
    def width(self) -> int:
        """Entries of a token's output."""
        return self.heads * self.own

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.units * self.shared

    @property
    def first_read(self) -> int:
        """First channel of queries (C)."""
        return 0 if self.norms_heads else self.width + self.units * self.shared

    @property
    def first_write(self) -> int:
        """First channel of keys (B)."""
        return self.units * self.shared if self.norms_heads else self.width

    @property
    def first_value(self) -> int:
        """First channel of values (x)."""
        return 2 * self.units * self.shared if self.norms_heads else 0

    @property
    def decays(self) -> int:
        """Decay inputs of a token."""
        if self.rule == RecurrentRule.MAMBA2:
            return 0
        return self.heads * self.shared if self.by_channel else self.heads

    @property
    def shared_tile(self) -> int:
        """Tile of K in prefill kernels."""
        return _tile_of(self.shared)

    @property
    def own_tile(self) -> int:
        """Tile of W in prefill kernels."""
        return _tile_of(self.own)


def _tile_of(size: int) -> int:
    """Returns the tile of a size, at least 64: for narrower 16-bit tiles, triton 3.6 reads beyond
    shared memory in `wy_fwd`."""
    return max(64, next_power_of_2(size))


class DeltaWeights(NamedTuple):
    """Small weights of a Gated DeltaNet or KDA layer. Legend: C channels, J taps, V value heads (of
    KDA all heads), K key_dim, W value_dim."""

    conv: Any
    """[C, J], any float type, contiguous."""
    decay_rate: Any
    """[V] float32, negative: the factor of softplus in a log decay."""
    decay_bias: Any
    """[V], or for KDA [V * K]: float32, added before softplus."""
    norm: Any
    """[W] float32."""
    norm_eps: Any
    conv_bias: None = None
    """The convolution has none."""


class Mamba2Weights(NamedTuple):
    """Small weights of a Mamba2 layer. Legend: C channels, J taps, H heads, P head_dim."""

    conv: Any
    """[C, J], any float type, contiguous."""
    conv_bias: Any
    """[C], likewise, or None."""
    rate: Any
    """[H] float32, negative: the published A."""
    dt_bias: Any
    """[H] float32, added before softplus."""
    dt_limit: Any
    """Bounds of time steps: two numbers."""
    skip: Any
    """[H] float32: the published D."""
    norm: Any
    """[H * P] float32. If None, outputs are gated but not normed."""
    norm_eps: Any


Weights = DeltaWeights | Mamba2Weights


class KDAProjected(NamedTuple):
    """Outputs of KDA's projections. Legend: T tokens, C channels, H heads, K head_dim."""

    rows: Tensor
    """[T, C + H]: queries, keys, values (the C channels), heads side by side, and betas before
    their sigmoid."""
    decays: Tensor
    """[T, H * K], inputs of log decays; rows may be strided."""
    gate: Tensor
    """[T, H * K], the output's gate before its sigmoid; rows may be strided."""


MixerProjections = Tensor | KDAProjected
"""Outputs of a mixer's input projections, heads side by side. Gated DeltaNet [T, C + V * W + 2 *
V]: queries, keys and values (the C channels), output gates, betas [V] before their sigmoid, decay
inputs [V]. Mamba2 [T, H * P + C + H]: gates, then x, B and C (the C channels), time steps."""
