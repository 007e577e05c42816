"""Quantised products in plain torch, for every device: `forms` has the definition of one.

Legend: T tokens, X experts, N experts for each token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.products.forms.quantised import Quantised, multiply


def mix(hidden: Tensor, shares: Tensor, experts: Tensor, up: Quantised, down: Quantised) -> Tensor:
    """The outputs of each token's experts, times their shares, added up: [T, 1, H].

    `hidden` [T, H], `shares` and `experts` [T, N]; `up` [X, 2 * I, H] holds an expert's gate rows,
    then its up rows, or [X, I, H] its up rows alone: then a ReLU is squared; `down` [X, H, I].
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    output = hidden.new_zeros(len(hidden), down.num_outputs, dtype=dtype)
    width = down.num_inputs
    for expert, tokens in _find_tokens(experts, len(up.scales)):
        inner = multiply(hidden[tokens], up.of(expert))
        is_gated = inner.shape[1] > width
        active = F.silu(inner[:, :width]) * inner[:, width:] if is_gated else F.relu(inner) ** 2
        share = torch.where(experts[tokens] == expert, shares[tokens], 0).sum(1, keepdim=True)
        output[tokens] += (multiply(active, down.of(expert)) * share).to(dtype)
    return output.to(hidden.dtype).unsqueeze(1)


def _find_tokens(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor | slice]]:
    """Experts and the tokens that they may have. A device must not be asked what was chosen, for
    its steps are recorded: there each expert gets all tokens, which is slow and right."""
    if experts.device.type != "cpu":
        yield from ((expert, slice(None)) for expert in range(num_experts))
        return
    for expert in experts.unique().tolist():
        yield expert, (experts == expert).any(1).nonzero().squeeze(1)
