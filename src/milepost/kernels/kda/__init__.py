"""Kimi Delta Attention from the projections to the output projection, over pools of states: short
convolution, L2 norms, decays by channel, delta rule and gated norm.

This is the door to the op: callers import it from here, whatever computes it. It can be imported
without triton. `KDAOperation.lay_out` chooses the kernels by the device's capabilities; what it
returns is what `mix` goes by. `reference` and `conv.reference` are the definition, on any device;
in the fused kernels sums are float32, the operands of matrix products have the projection's type.

Legend: T tokens, S sequences, C = 3 * H * K channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.kda import mixer
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.layout import chunks
from milepost.kernels.layout.batch import Batch
from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.layout.verify import (
    DecodeLayout,
    VerifyLayout,
    lay_out_decodes,
    lay_out_verifies,
)
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import check_contiguous, check_rows, check_slots
from milepost.kernels.recurrent.mixer_rows import MixerRows, lay_out_rows

__all__ = ["CHUNK", "KDAOperation", "KDAWeights", "mix"]

MixerLayout = ChunkLayout | DecodeLayout | VerifyLayout | MixerRows

CHUNK = 64
"""Tokens in a full chunk."""
_LINE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAOperation:
    """The token mixer behind convolutions of so many taps."""

    conv_width: int
    num_heads: int
    head_dim: int

    def lay_out(self, batch: Batch) -> MixerLayout:
        """Chunks for the fused kernels, or what they need where every sequence decodes or the step
        may verify; or rows for the reference."""
        if batch.chip is None:
            return lay_out_rows(batch, conv_width=self.conv_width, chunk=CHUNK)
        if batch.capacity.num_drafts:
            return lay_out_verifies(batch, CHUNK)
        if batch.capacity.decodes:
            return lay_out_decodes(batch.capacity.num_sequences, self.num_heads)
        return chunks.lay_out_step(batch, CHUNK)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's; rows of bfloat16 that are no
        whole lines of memory leave wrong states there (an H200, triton 3.6)."""
        if self.head_dim % _LINE:
            return f"the fused ones have heads of multiples of {_LINE}, not {self.head_dim}"
        return ""


def mix(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: MixerLayout,
    records: Tensor | None = None,
) -> Tensor:
    """Advance the sequences by all their tokens, as `layout` has them; returns [T, H * K] and
    writes both pools, the states of exports among them.

    `projected` [T, C + H]: queries, keys, values (the C channels), heads side by side, and betas
    before their sigmoid. `decay_inputs` and `gate` [T, H * K], contiguous: what softplus is taken
    of, and what the output's gate is the sigmoid of. `conv_pool` [slots, C, J - 1],
    `recurrent_pool` [slots, H, K, K], `slot_in` and `slot_out` [S] of any integer type. Rows of
    `projected` may be strided, as may a pool's slots be, and nothing else.

    `records` [rows, drafts, C + H + H * K] hold, of each draft that a sequence had in its step
    before, its row of `projected` and of `decay_inputs`; those of this step's drafts take their
    place. A state is written as it is behind a sequence's first token, never behind a draft.

    A slot that is written is read by no other sequence of the batch; several sequences may read one
    slot, and slot_out may be slot_in. Where slot_out is negative there is no sequence; outputs of
    padding are zeros, but for steps that verify, where they hold anything.
    """
    inputs, pools = (projected, decay_inputs, gate, weights), (conv_pool, recurrent_pool)
    if isinstance(layout, MixerRows):
        return mixer.mix(*inputs, *pools, layout, records)
    check_rows(projected=projected, slot_in=slot_in, slot_out=slot_out)
    check_slots(conv_pool=conv_pool, recurrent_pool=recurrent_pool)
    check_contiguous(decay_inputs=decay_inputs, gate=gate)
    if isinstance(layout, DecodeLayout):
        from milepost.kernels.kda import triton_step

        return triton_step.decode(*inputs, *pools, slot_in, slot_out, layout)
    from milepost.kernels.kda import triton_prefill

    if isinstance(layout, VerifyLayout):
        from milepost.kernels.kda import triton_step

        assert records is not None, "V1: only mixers that keep records verify"
        many = layout.prefills
        if many is None:
            output = torch.empty_like(gate)
        else:
            slots = many.slot_in, many.slot_out
            output = triton_prefill.prefill(*inputs, *pools, *slots, many.chunks)
        triton_step.verify(*inputs, *pools, layout, records, output)
        return output
    return triton_prefill.prefill(*inputs, *pools, slot_in, slot_out, layout)
