"""What a fused prefill's four launches have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.platform.tiles import next_power_of_2

_MIN_BLOCK = 64
"""Narrower tiles of half precision make triton 3.6 read beyond shared memory in `wy_fwd`."""


@dataclass(frozen=True, slots=True)
class PrefillShapes:
    """Numbers of heads, and sizes."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    conv_width: int
    chunk: int

    @property
    def heads(self) -> dict[str, int]:
        """Constants of every kernel."""
        return {
            "KEY_HEADS": self.key_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
        }

    @property
    def blocks(self) -> dict[str, int]:
        """Constants of those that work by chunks."""
        return {
            "VALUE_HEADS": self.value_heads,
            "C": self.chunk,
            "BLOCK_K": max(_MIN_BLOCK, next_power_of_2(self.key_dim)),
            "BLOCK_W": max(_MIN_BLOCK, next_power_of_2(self.value_dim)),
        }


def shapes_of(
    weights: GatedDeltaWeights, recurrent_pool: Tensor, layout: ChunkLayout
) -> PrefillShapes:
    """Of a layer."""
    _, value_heads, key_dim, value_dim = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    sizes = key_heads, value_heads, key_dim, value_dim, channels, conv_width
    return PrefillShapes(*sizes, layout.chunk)
