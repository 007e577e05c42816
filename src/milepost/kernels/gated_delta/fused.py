"""Gated DeltaNet from the input projection to the output projection, for CUDA: short convolution,
L2 norms, gates, gated delta rule and gated norm.

This is a door that can be imported without triton, which the calls need. `conv.reference`,
`gated_delta.reference` and the layer's own lines on a CPU are the definition; sums are float32, the
operands of matrix products have the projection's type.

A projection's columns are, heads side by side: queries, keys, values (the C channels), output gates
[V * W], write strengths [V], decay inputs [V]. Its rows may be strided, as may
a pool's slots be, and nothing else.

A slot that is written is read by no other sequence of the batch; several sequences may read one
slot, and slot_out may be slot_in. Where slot_out is negative there is no sequence.

Legend: T tokens, D decoding sequences, S sequences, C channels, J taps, V value heads, K key_dim, W
value_dim.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.gated_delta.tiles import FusedLayout, lay_out
from milepost.kernels.gated_delta.weights import MixerWeights

__all__ = ["FusedLayout", "MixerWeights", "decode", "lay_out", "prefill"]


def decode(
    projected: Tensor,
    weights: MixerWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """Advance D sequences by one token each; returns [D, V * W] and writes both pools.

    `projected` [D, C + V * W + 2 * V], `conv_pool` [slots, C, J - 1], `recurrent_pool` [slots, V,
    K, W], `slot_in` and `slot_out` [D] of any integer type. Outputs of padding are zeros.
    """
    from milepost.kernels.gated_delta import triton_decode

    return triton_decode.decode(projected, weights, conv_pool, recurrent_pool, slot_in, slot_out)


def prefill(
    projected: Tensor,
    weights: MixerWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: FusedLayout,
) -> Tensor:
    """Advance S sequences by all their tokens; returns [T, V * W] and writes both pools.

    Arguments as for `decode`, with T tokens in place of D, `slot_in` and `slot_out` [S]; `layout`
    holds tensors on the same device, its capacities are T and S. States that it names as exports
    are written on the way. Outputs of tokens that no sequence has are zeros.
    """
    from milepost.kernels.gated_delta import triton_prefill

    return triton_prefill.prefill(
        projected, weights, conv_pool, recurrent_pool, slot_in, slot_out, layout
    )
