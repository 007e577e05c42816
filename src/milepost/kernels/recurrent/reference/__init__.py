"""Token mixers in plain torch: the definition, on any device.

rows          a step's tokens, and what is done with them in which order
delta         the delta rule of the next two, in the chunkwise form
gated_delta   Gated DeltaNet
kda           Kimi Delta Attention
mamba2        Mamba2
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.recurrent.reference import gated_delta, kda, mamba2
from milepost.kernels.recurrent.reference.rows import MixerRows, lay_out_rows
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.weights import (
    GatedDeltaWeights,
    KDAProjected,
    KDAWeights,
    MixerProjections,
    Weights,
)

__all__ = ["MixerRows", "lay_out_rows", "mix"]


def mix(
    projected: MixerProjections, weights: Weights, states: LayerStates, rows: MixerRows
) -> Tensor:
    """See `recurrent.mix`."""
    if isinstance(weights, KDAWeights):
        assert isinstance(projected, KDAProjected)
        return kda.mix(projected, weights, states, rows)
    assert isinstance(projected, Tensor)
    if isinstance(weights, GatedDeltaWeights):
        return gated_delta.mix(projected, weights, states, rows)
    return mamba2.mix(projected, weights, states, rows)
