"""One step of the decoding sequences of a recurrent mixer, on any chip that runs Triton.

1. `convolve_kernel`: convolution and SiLU of tokens, vector by vector (a query, a key, a value). It
   moves the states of the convolution on, and records the inputs of drafts.
2. `update_kernel`: a program takes the state of a head, or of some, through all tokens in
   registers: first the recorded ones that are folded in, then the sequence's own, after which the
   state is written, then its drafts. Each new token reads the state. Where a head is normed by
   itself the program also norms and gates what was read.
3. Else the heads of a unit are normed together: in a step without drafts by the last program of the
   unit to arrive, with drafts by `finish_kernel`. Who norms changes no bit.

A step without drafts (VERIFIES is false) takes the same operations for a token in the same order.
A slot that is written is read by no other sequence, so slot_out may be slot_in.

Legend: S sequences, T tokens, U units, W entries of a head's output.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from milepost.kernels.layout.emit import Fp8Rows
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import OVERLAPPED
from milepost.kernels.recurrent.portable.step_kernels import (
    convolve_kernel,
    finish_kernel,
    update_kernel,
)
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer, MixerSizes, StepOutput

_COLUMNS = 512
"""Columns that a program of the last launch leaves to the next step."""


def run(
    mixer: Mixer,
    steps: DecodingSteps,
    output: Tensor,
    arrivals: Tensor | None = None,
    fp8: Fp8Rows | None = None,
) -> None:
    """Fold recorded drafts, advance each sequence by one token, continue through drafts; writes
    `output` [T, U * GROUP * W] of the decoding sequences, without drafts zeros for padding.

    `arrivals` [S, U] are zeros and stay so; units that are normed together need them in a step
    without drafts.
    """
    assert fp8 is None, "outputs are rounded by who reads them"
    norms_heads = mixer.sizes.norms_heads
    read = None if norms_heads else torch.empty_like(output, dtype=torch.float32)
    outputs = StepOutput(read, output)
    _launch(mixer, steps, arrivals, outputs)
    if steps.records is not None and not norms_heads:
        finish(mixer, steps, outputs, moves=False)


def finish(mixer: Mixer, steps: DecodingSteps, output: StepOutput, *, moves: bool) -> None:
    """Norm and gate what new tokens have read, unit by unit. If it `moves`, also move the
    convolution's states on and record the drafts, which another kernel has left to do."""
    sizes, most = mixer.sizes, steps.num_drafts + 1
    num_blocks = triton.cdiv(max(sizes.channels, sizes.strengths), _COLUMNS) if moves else 0
    finish_kernel[(sizes.units * most + num_blocks, len(steps.sequences.slot_out))](
        mixer.inputs,
        mixer.weights,
        steps.conv,
        steps.sequences,
        steps.records,
        output,
        SIZES=sizes,
        FINISH=mixer.rule.finish,
        MOST=most,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **OVERLAPPED,
    )


def _launch(
    mixer: Mixer, steps: DecodingSteps, arrivals: Tensor | None, output: StepOutput
) -> None:
    """The first two launches; `output.read` is filled where units are normed together."""
    sizes, rule, places = mixer.sizes, mixer.rule, steps.num_places
    num_sequences, verifies = len(steps.sequences.slot_out), steps.records is not None
    device = output.base.device
    mixed = torch.empty(num_sequences, places, sizes.channels, dtype=torch.float32, device=device)
    common = steps.sequences, steps.records, mixed, places
    convolve_kernel[(num_sequences, 2 * sizes.units + sizes.heads)](
        mixer.inputs.mixed,
        mixer.weights,
        steps.conv,
        *common,
        SIZES=sizes,
        VERIFIES=verifies,
        num_warps=1,
    )
    heads, num_warps = _cut(sizes, num_sequences, device)
    update_kernel[(sizes.heads // heads, num_sequences)](
        mixer.inputs,
        mixer.weights,
        steps.recurrent,
        *common,
        arrivals,
        output,
        SIZES=sizes,
        OPEN_HEAD=rule.open_head,
        STRENGTHS=rule.strengths,
        ADVANCE=rule.advance,
        READ=rule.read,
        FINISH=rule.finish,
        HEADS=heads,
        VERIFIES=verifies,
        num_warps=num_warps,
        **OVERLAPPED,
    )


def _cut(sizes: MixerSizes, num_sequences: int, device: torch.device) -> tuple[int, int]:
    """Heads of a program, and its warps: two heads share what a unit shares, where they are normed
    together and there is work for all SMs."""
    entries = triton.next_power_of_2(sizes.shared) * triton.next_power_of_2(sizes.own)
    if sizes.norms_heads:
        return 1, min(16, max(4, entries // 4096))
    are_few = sizes.heads * num_sequences < 4 * num_sms(device)
    heads = 1 if are_few or sizes.group % 2 else 2
    return heads, min(16, max(4, entries // 2048) * heads)
