"""KDA's decode and verify steps: Hopper's kernels where they can do the work, else those for any
chip."""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.gated_delta.triton_step import suits_hopper
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.layout.verify import DecodeLayout, VerifyLayout
from milepost.kernels.recurrent.portable import step
from milepost.kernels.recurrent.rules import kda


def decode(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: DecodeLayout,
) -> Tensor:
    """Advance each sequence by one token; see `kda.mix`."""
    inputs, pools = (projected, decay_inputs, gate, weights), (conv_pool, recurrent_pool)
    if suits_hopper(recurrent_pool):
        from milepost.kernels.kda import triton_hopper

        return triton_hopper.decode(*inputs, *pools, slot_in, slot_out)
    mixer = kda.describe(*inputs, recurrent_pool)
    return step.decode(mixer, *pools, slot_in, slot_out, layout)


def verify(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Write `output` [T, H * K] of the decoding sequences; see `kda.mix`."""
    inputs, pools = (projected, decay_inputs, gate, weights), (conv_pool, recurrent_pool)
    if suits_hopper(recurrent_pool):
        from milepost.kernels.kda import triton_hopper_verify

        triton_hopper_verify.verify(*inputs, *pools, layout, records, output)
        return
    mixer = kda.describe(*inputs, recurrent_pool)
    step.verify(mixer, *pools, layout, records, output)
