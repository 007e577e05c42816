"""Mamba2's decode and verify steps: Hopper's kernels where they can do the work, else those for any
chip."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.layout.verify import DecodeLayout, VerifyLayout
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.platform.device import runs_gluon
from milepost.kernels.recurrent.portable import step
from milepost.kernels.recurrent.rules import mamba2
from milepost.kernels.recurrent.structures import StepOutput


def decode(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: DecodeLayout,
) -> Tensor:
    """Advance each sequence by one token; see `mamba2.mix`."""
    pools, slots = (conv_pool, recurrent_pool), (slot_in, slot_out)
    if runs_gluon(projected):
        from milepost.kernels.mamba2 import triton_hopper

        if triton_hopper.suits(weights, recurrent_pool, len(slot_out)):
            return triton_hopper.decode(projected, weights, *pools, *slots)
    mixer = mamba2.describe(projected, weights, recurrent_pool)
    return step.decode(mixer, *pools, *slots, layout)


def verify(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Write `output` [T, H * P] of the decoding sequences; see `mamba2.mix`."""
    mixer = mamba2.describe(projected, weights, recurrent_pool)
    pools = conv_pool, recurrent_pool
    if runs_gluon(projected):
        from milepost.kernels.mamba2 import triton_hopper, triton_hopper_verify

        if triton_hopper.suits_states(recurrent_pool):
            read = torch.empty_like(output, dtype=torch.float32)
            walk = projected, weights, *pools, layout, records, read
            squares = triton_hopper_verify.walk(*walk)
            outputs = StepOutput(read, mixer.gate, output, squares)
            step.finish(mixer, conv_pool, layout, records, outputs, moves=True)
            return
    step.verify(mixer, *pools, layout, records, output)
