"""Gated DeltaNet's decode and verify steps: Hopper's kernels where they can do the work, else those
for any chip."""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.layout.verify import DecodeLayout, VerifyLayout
from milepost.kernels.platform.device import num_sms, runs_gluon
from milepost.kernels.recurrent.portable import step
from milepost.kernels.recurrent.rules import gated_delta


def suits_hopper(recurrent_pool: Tensor) -> bool:
    """Whether Hopper's kernels run steps over these states: decodes and verifies alike, whatever
    the number of sequences, because the two backends add up squares in different orders."""
    if not runs_gluon(recurrent_pool):
        return False
    from milepost.kernels.gated_delta import triton_hopper

    return triton_hopper.suits(recurrent_pool)


def decode(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: DecodeLayout,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """Advance each sequence by one token; see `gated_delta.mix`."""
    pools, slots = (conv_pool, recurrent_pool), (slot_in, slot_out)
    if suits_hopper(recurrent_pool):
        from milepost.kernels.gated_delta import triton_hopper

        num_heads = len(slot_out) * recurrent_pool.shape[1]
        arrivals = layout.arrivals if num_heads <= num_sms(projected.device) else None
        return triton_hopper.decode(projected, weights, *pools, *slots, arrivals, emit=emit)
    mixer = gated_delta.describe(projected, weights, recurrent_pool)
    return step.decode(mixer, *pools, *slots, layout)


def verify(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Write `output` [T, V * W] of the decoding sequences; see `gated_delta.mix`."""
    pools = conv_pool, recurrent_pool
    if suits_hopper(recurrent_pool):
        from milepost.kernels.gated_delta import triton_hopper_verify

        triton_hopper_verify.verify(projected, weights, *pools, layout, records, output)
        return
    mixer = gated_delta.describe(projected, weights, recurrent_pool)
    step.verify(mixer, *pools, layout, records, output)
