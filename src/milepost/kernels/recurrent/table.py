"""The kernels of token mixers, in four tables: steps of sequences that decode, without and with
drafts; a prefill's states from chunk to chunk, and what its tokens read.

A kernel's module launches it as `run`: steps as `run(mixer, steps, output, arrivals, fp8)`, states
as `run(mixer, chunk, pool, chunks, tensors)`, outputs as `run(mixer, chunk, chunks, tensors,
output, fp8)`. Nothing here needs a GPU, or Triton.

Legend: K entries that a state is read along, W entries of a head's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from milepost.kernels.layout.emit import Emit
from milepost.kernels.platform.device import Chip, why_no_gluon
from milepost.kernels.platform.tables import HOPPER, Kernel, KernelTable, RowRange
from milepost.kernels.recurrent.weights import (
    GatedDeltaWeights,
    KDAWeights,
    Mamba2Weights,
    Weights,
)

CHUNK = 64
"""Tokens in a full chunk of the delta rule."""
HOST_BOUND_TOKENS = 4096
"""Tokens up to which the host often takes as long to launch a layer as the device to compute it:
TMA's descriptors cost it some 0.1 ms."""
MOST_GROUPED_HEADS = 16
"""Heads of a Mamba2 group that Hopper's kernels take: its outputs stay in registers until its norm
is known."""
_DELTA_STATE, _SSD_STATE = (128, 128), (128, 64)
"""K and W of states that a program on Hopper holds in registers."""
_COLUMNS = 32
"""Columns of a state in one program of Hopper's `chunk_h`."""
_LINE, _ALIGNMENT, _MOST_LINES = 32, 16, 2**31
"""Numbers of a line that TMA copies, the bytes where it begins, and how many it counts to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A layer's recurrence, as far as it decides which kernel runs."""

    rule: type[Weights]
    num_units: int
    """Key heads, or groups."""
    num_heads: int
    shared: int
    """K"""
    own: int
    """W"""
    has_norm: bool = True

    @property
    def group(self) -> int:
        return self.num_heads // self.num_units

    @property
    def state(self) -> tuple[int, int]:
        return self.shared, self.own


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPart:
    """A part of a mixer's work in a step."""

    recurrence: Recurrence
    num: int
    """Sequences of a decode or verify, tokens of a prefill."""
    element_bytes: int = 2
    chunk: int = CHUNK
    is_reached: bool = True
    """Whether states are in float32 and TMA reaches them: see `is_reached`."""

    @property
    def form(self) -> type[Any]:
        return self.recurrence.rule

    def count(self, unit: str) -> float:  # noqa: ARG002
        return self.num

    def why_not(self, kernel: Kernel[Any]) -> str:  # noqa: ARG002
        return ""


def needs_arrivals(recurrence: Recurrence, num_sequences: int, chip: Chip) -> bool:
    """Whether a decode's programs may wait for each other: Mamba2's heads are normed together, and
    Hopper takes few sequences of Gated DeltaNet value head by value head."""
    if recurrence.rule is Mamba2Weights:
        return True
    are_few = num_sequences * recurrence.num_heads <= chip.num_sms
    return recurrence.group > 1 and are_few and not why_no_gluon(chip)


def is_reached(recurrent_pool: Tensor) -> bool:
    """Whether `recurrent_pool` [slots, heads, ...] is in float32, and TMA reaches all of it."""
    stride = recurrent_pool.stride(0)
    is_aligned = recurrent_pool.data_ptr() % _ALIGNMENT == 0 and stride % 128 == 0
    num_lines = len(recurrent_pool) * stride // _LINE
    return recurrent_pool.dtype == torch.float32 and is_aligned and num_lines < _MOST_LINES


def _unless_state(part: MixerPart, size: tuple[int, int]) -> str:
    if part.recurrence.state != size:
        return "states are not {} x {}".format(*size)
    return "" if part.is_reached else "TMA reaches only states of float32"


def _refuses_delta_step(part: MixerPart, chip: Chip) -> str:
    """Decodes and verifies alike, whatever the number of sequences, because the two backends add up
    squares in different orders."""
    return _unless_state(part, _DELTA_STATE)


def _refuses_ssd_verify(part: MixerPart, chip: Chip) -> str:
    return _unless_state(part, _SSD_STATE)


def _refuses_ssd_decode(part: MixerPart, chip: Chip) -> str:
    recurrence = part.recurrence
    if not recurrence.has_norm:
        return "no norm"
    if recurrence.group > MOST_GROUPED_HEADS:
        return f"more than {MOST_GROUPED_HEADS} heads in a group"
    if 2 * recurrence.num_units * part.num <= chip.num_sms:
        return "not work for all SMs"
    return _unless_state(part, _SSD_STATE)


def _unless_long(part: MixerPart) -> str:
    if part.element_bytes != 2 or part.chunk != CHUNK:
        return "not 16 bits and chunks of 64"
    return "" if part.num > HOST_BOUND_TOKENS else f"up to {HOST_BOUND_TOKENS} tokens"


def _refuses_chunk_h(part: MixerPart, chip: Chip) -> str:
    is_whole = part.recurrence.shared == _DELTA_STATE[0] and part.recurrence.own % _COLUMNS == 0
    return _unless_long(part) if is_whole else "keys are not of 128"


def _refuses_chunk_o(part: MixerPart, chip: Chip) -> str:
    return _unless_long(part) if part.recurrence.state == _DELTA_STATE else "heads are not of 128"


_DELTA, _SSD = (GatedDeltaWeights, KDAWeights), (Mamba2Weights,)
_ANY = (*_DELTA, *_SSD)
_STEP: Kernel[MixerPart] = Kernel(
    name="step", module="recurrent.portable.step", forms=_ANY, order="rows, tree"
)

DECODES: KernelTable[MixerPart] = KernelTable(
    Kernel(
        name="delta decode, Hopper",
        module="recurrent.hopper.delta_decode",
        forms=_DELTA,
        needs=HOPPER,
        epilogues=(Emit.VALUES, Emit.FP8),
        refuses=_refuses_delta_step,
        order="4 rows, warps",
    ),
    Kernel(
        name="mamba2 decode, Hopper",
        module="recurrent.hopper.mamba2_decode",
        forms=_SSD,
        needs=HOPPER,
        refuses=_refuses_ssd_decode,
        order="4 columns, warps",
    ),
    _STEP,
)
"""Steps of sequences that each decode one token."""
VERIFIES: KernelTable[MixerPart] = KernelTable(
    Kernel(
        name="delta verify, Hopper",
        module="recurrent.hopper.delta_verify",
        forms=_DELTA,
        needs=HOPPER,
        refuses=_refuses_delta_step,
        order="4 rows, warps",
    ),
    Kernel(
        name="mamba2 verify, Hopper",
        module="recurrent.hopper.mamba2_verify",
        forms=_SSD,
        needs=HOPPER,
        refuses=_refuses_ssd_verify,
        order="4 columns, warps",
    ),
    _STEP,
)
"""Steps that may verify drafts."""
STATES: KernelTable[MixerPart] = KernelTable(
    Kernel(
        name="chunk_h, Hopper",
        module="recurrent.hopper.chunk_h",
        forms=_DELTA,
        needs=HOPPER,
        rows=RowRange(),
        refuses=_refuses_chunk_h,
        order="64 seq",
    ),
    Kernel(name="chunk_h", module="recurrent.portable.chunk_h", forms=_DELTA, order="64 seq"),
    Kernel(name="ssd", module="recurrent.portable.ssd", forms=_SSD, order="chunk seq"),
)
"""A prefill's states from chunk to chunk; SSD's kernels are launched together."""
OUTPUTS: KernelTable[MixerPart] = KernelTable(
    Kernel(
        name="chunk_o, Hopper",
        module="recurrent.hopper.chunk_o",
        forms=(GatedDeltaWeights,),
        needs=HOPPER,
        epilogues=(Emit.VALUES, Emit.FP8),
        refuses=_refuses_chunk_o,
        order="state, tokens",
    ),
    Kernel(
        name="chunk_o",
        module="recurrent.portable.chunk_o",
        forms=_DELTA,
        epilogues=(Emit.VALUES, Emit.FP8, Emit.BOTH),
        order="state, tokens",
    ),
    Kernel(name="ssd", module="recurrent.portable.ssd", forms=_SSD, order="state, tokens"),
)
"""Outputs of a prefill's tokens."""

TABLES = {
    "decode": DECODES,
    "verify": VERIFIES,
    "prefill, states": STATES,
    "prefill, outputs": OUTPUTS,
}
