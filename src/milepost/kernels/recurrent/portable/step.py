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

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import OVERLAPPED
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.portable.step_kernels import (
    convolve_kernel,
    finish_kernel,
    update_kernel,
)
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer, StepOutput

_COLUMNS = 512
"""Columns per program that the last launch writes for the next step."""


def run(
    mixer: Mixer,
    steps: DecodingSteps,
    output: Tensor,
    arrivals: Tensor | None = None,
) -> None:
    """Folds recorded drafts into the states, advances each sequence by one token and goes on
    through its drafts. Writes `output` [T, U * GROUP * W] of the decoding sequences; padding gets
    zeros in steps without drafts.

    `arrivals` [S, U] int32 are zeros before and after. Steps without drafts need them for units
    that are normed together.
    """
    sizes, num_sequences = mixer.sizes, len(steps.sequences.slot_out)
    read = None if sizes.norms_heads else torch.empty_like(output, dtype=torch.float32)
    target = StepOutput(read, output)
    mixed = output.new_empty(num_sequences, steps.num_places, sizes.channels, dtype=torch.float32)
    operands = mixer.inputs, mixer.weights, steps, mixed, steps.num_places
    convolve_kernel[(num_sequences, 2 * sizes.units + sizes.heads)](
        *operands, SIZES=sizes, num_warps=1
    )
    num_cut = 1 if mixer.order.is_fixed else num_sequences
    heads, num_warps = _cut(sizes, num_cut, output.device)
    functions = {name.upper(): function for name, function in mixer.rule._asdict().items()}
    options = {"HEADS": heads, "num_warps": num_warps, **functions, **OVERLAPPED}
    grid = sizes.heads // heads, num_sequences
    update_kernel[grid](*operands, arrivals, target, SIZES=sizes, **options)
    if steps.records is not None and not sizes.norms_heads:
        finish(mixer, steps, target, moves=False)


def finish(mixer: Mixer, steps: DecodingSteps, output: StepOutput, *, moves: bool) -> None:
    """Norms and gates what new tokens have read, unit by unit. With `moves` it also advances the
    convolution states and records the drafts, if the kernel before left that to do."""
    sizes, most = mixer.sizes, steps.num_drafts + 1
    num_blocks = triton.cdiv(max(sizes.channels, sizes.heads), _COLUMNS) if moves else 0
    grid = sizes.units * most + num_blocks, len(steps.sequences.slot_out)
    operands = mixer.inputs, mixer.weights, steps, output
    options = {"MOST": most, "COLUMNS": _COLUMNS, "num_warps": 4, **OVERLAPPED}
    finish_kernel[grid](*operands, SIZES=sizes, **options)


def _cut(sizes: MixerSizes, num_sequences: int, device: torch.device) -> tuple[int, int]:
    """Returns a program's number of heads and of warps. Heads that are normed together are taken
    two at a time if that leaves work for all SMs."""
    entries = triton.next_power_of_2(sizes.shared) * triton.next_power_of_2(sizes.own)
    if sizes.norms_heads:
        return 1, min(16, max(4, entries // 4096))
    are_few = sizes.heads * num_sequences < 4 * num_sms(device)
    heads = 1 if are_few or sizes.group % 2 else 2
    return heads, min(16, max(4, entries // 2048) * heads)
