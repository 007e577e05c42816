"""Estimates the largest step whose kernels run no longer than the host takes to launch them.

A rule of thumb instead of a measurement, so that it is the same on every machine with such a chip
and on every rank: the choice of steps that are graphs decides how their sums are rounded.
"""

from __future__ import annotations

from torch import nn

from milepost.kernels.layout.emit import Emit
from milepost.kernels.platform.device import Chip
from milepost.layers.linear import Linear
from milepost.layers.moe import MoE
from milepost.models.decoder import Decoder

_LAUNCH_S = 0.7e-3
"""Time to launch a layer: 0.4 to 1.5 ms on the measured hosts."""
_FLOPS = ((9, 0), 4e12), ((8, 0), 1.5e12), ((0, 0), 2e12)
"""FLOPS of one SM in a whole 16-bit prefill, by lowest compute capability. The last row is for AMD.
An H200 reaches 2.6e12 to 5e12."""


def most_launched_tokens(model: Decoder, chip: Chip) -> int:
    """Returns the number of tokens up to which a prefill is bound by its launches."""
    flops = next(rate for capability, rate in _FLOPS if chip.capability >= capability)
    return int(len(model.layers) * _LAUNCH_S * chip.num_sms * flops / (2 * num_weights(model)))


def num_weights(model: Decoder) -> float:
    """Counts the weights of layers that a token is multiplied by on this rank, at least 1; FP8 by
    FP8 counts half, as it takes half as long."""
    modules = (module for layer in model.layers for module in layer.modules())
    return max(sum(map(_of_module, modules)), 1)


def _of_module(module: nn.Module) -> float:
    if isinstance(module, MoE):
        return module.num_weights / (1 if module.experts.reads is Emit.VALUES else 2)
    if isinstance(module, Linear):
        return module.num_weights / (1 if module.reads is Emit.VALUES else 2)
    return 0
