"""Quantised products in plain torch, for every device: `forms` has the definition of one.

Legend: T tokens, X experts, N experts for each token, H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.quantised.forms import Quantised, multiply


def mix(hidden: Tensor, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised) -> Tensor:
    """The outputs of each token's experts, times their shares, added up: [T, 1, H].

    `hidden` [T, H], `shares` and `experts` [T, N]; `up` [X, 2 * I, H] holds an expert's gate rows,
    then its up rows, or [X, I, H] its up rows alone: then a ReLU is squared; `down` [X, H, I].
    """
    output = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for expert in experts.unique().tolist():
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        inner, width = multiply(hidden[tokens], up.of(expert)), down.num_inputs
        is_gated = inner.shape[1] > width
        active = F.silu(inner[:, :width]) * inner[:, width:] if is_gated else F.relu(inner) ** 2
        mixed = multiply(active, down.of(expert))
        output.index_add_(0, tokens, (mixed * shares[tokens, places, None]).to(output.dtype))
    return output.to(hidden.dtype).unsqueeze(1)
