"""Token mixers in plain torch: the definition, on any device.

rows          a step's tokens, and what is done with them in which order
delta         the delta rule of the next two, in the chunkwise form
gated_delta   Gated DeltaNet and Kimi Delta Attention
mamba2        Mamba2
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from milepost.kernels.recurrent.reference import gated_delta, mamba2
from milepost.kernels.recurrent.reference.rows import (
    MixerPieces,
    MixerRows,
    lay_out_pieces,
    lay_out_rows,
)
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.weights import (
    GatedDeltaWeights,
    KDAProjected,
    KDAWeights,
    Mamba2Weights,
    MixerProjections,
    Weights,
)

__all__ = ["MixerPieces", "MixerRows", "lay_out_pieces", "lay_out_rows", "mix"]


_MIXES: dict[type[Weights], Callable[..., Tensor]] = {
    GatedDeltaWeights: gated_delta.mix_gated_delta,
    KDAWeights: gated_delta.mix_kda,
    Mamba2Weights: mamba2.mix,
}


def mix(
    projected: MixerProjections,
    weights: Weights,
    states: LayerStates,
    rows: MixerRows | MixerPieces,
) -> Tensor:
    """See `recurrent.mix`."""
    define = _MIXES[type(weights)]
    if isinstance(rows, MixerRows):
        return define(projected, weights, states, rows)
    parts = [define(_take(projected, at), weights, states, own) for at, own in rows.pieces]
    return torch.cat(parts)


def _take(projected: MixerProjections, tokens: slice) -> MixerProjections:
    if isinstance(projected, Tensor):
        return projected[tokens]
    return KDAProjected(*(each[tokens] for each in projected))
