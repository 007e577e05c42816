"""Four tables of the kernels that serve token mixers: steps of sequences that decode, without and
with drafts; a prefill's states from chunk to chunk, and what its tokens read.

A row's entry, `run` if it names none, launches its kernel: steps with `(mixer, steps, output,
arrivals)`, states with `(mixer, chunk, pool, chunks, tensors)`, outputs with `(mixer, chunk,
chunks, tensors, output)`. Nothing here needs a GPU, or Triton.

Legend: K entries that a state is read along, W entries of a head's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from milepost.kernels.platform.device import Chip, why_no_gluon
from milepost.kernels.platform.tables import HOPPER, Condition, Kernel, KernelTable, row
from milepost.kernels.recurrent.mixer import DeltaWeights, Mamba2Weights, MixerSizes, RecurrentRule

CHUNK = 64
"""Tokens in a full chunk of the delta rule."""
HOST_BOUND_TOKENS = 4096
"""Up to this many tokens launching a layer takes about as long as computing it, and making TMA
descriptors costs the host another 0.1 ms."""
_DELTA_STATE, _SSD_STATE = (128, 128), (128, 64)
"""State shapes (K, W) that the Hopper kernels keep in registers."""
_COLUMNS = 32
"""Columns of a state in one program of Hopper's `chunk_h`."""
_LINE, _ALIGNMENT, _MOST_LINES = 32, 16, 2**31
"""TMA's limits: numbers per line, alignment in bytes, and number of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPart:
    """A part of a mixer's work in a step: the problem that the tables choose a kernel for."""

    sizes: MixerSizes
    num: int
    """Sequences of a decode or verify, tokens of a prefill."""
    element_bytes: int = 2
    chunk: int = CHUNK
    is_reached: bool = True
    """Whether TMA can load the states: see `is_reached`."""

    @property
    def form(self) -> type[Any]:
        return Mamba2Weights if self.sizes.rule == RecurrentRule.MAMBA2 else DeltaWeights

    def count(self, unit: str) -> float:  # noqa: ARG002
        return self.num

    def why_not(self, kernel: Kernel[Any]) -> str:  # noqa: ARG002
        return ""


def needs_arrivals(sizes: MixerSizes, num_sequences: int, chip: Chip) -> bool:
    """Whether a decode's programs may wait for each other: Mamba2's heads are normed together, and
    Hopper takes few sequences of Gated DeltaNet value head by value head."""
    if sizes.rule == RecurrentRule.MAMBA2:
        return True
    are_few = num_sequences * sizes.heads <= chip.num_sms
    return sizes.group > 1 and are_few and not why_no_gluon(chip)


def is_reached(recurrent_pool: Tensor) -> bool:
    """Whether TMA can load states from `recurrent_pool` [slots, heads, ...]: float32, aligned, and
    no more lines than TMA counts."""
    stride = recurrent_pool.stride(0)
    is_aligned = recurrent_pool.data_ptr() % _ALIGNMENT == 0 and stride % 128 == 0
    num_lines = len(recurrent_pool) * stride // _LINE
    return recurrent_pool.dtype == torch.float32 and is_aligned and num_lines < _MOST_LINES


# Conditions of kernels, each after the reason that is shown where it does not hold.
# fmt: off
_REACHED: Condition[MixerPart] = ("TMA reaches only states of float32", lambda it, _:
    it.is_reached)
_SILU: Condition[MixerPart] = ("it gates by SiLU", lambda it, _:
    it.sizes.by_channel or not it.sizes.gates_by_sigmoid)
_HALF: Condition[MixerPart] = ("not 16 bits and chunks of 64", lambda it, _:
    it.element_bytes == 2 and it.chunk == CHUNK)
_LONG: Condition[MixerPart] = (f"up to {HOST_BOUND_TOKENS} tokens", lambda it, _:
    it.num > HOST_BOUND_TOKENS)
_KEYS: Condition[MixerPart] = ("keys are not of 128", lambda it, _:
    it.sizes.shared == _DELTA_STATE[0] and it.sizes.own % _COLUMNS == 0)
_DELTA_STATES: Condition[MixerPart] = ("states are not {} x {}".format(*_DELTA_STATE), lambda it, _:
    (it.sizes.shared, it.sizes.own) == _DELTA_STATE)
_SSD_STATES: Condition[MixerPart] = ("states are not {} x {}".format(*_SSD_STATE), lambda it, _:
    (it.sizes.shared, it.sizes.own) == _SSD_STATE)

_DELTA, _SSD = (DeltaWeights,), (Mamba2Weights,)
_STEP: Kernel[MixerPart] = row("step", "recurrent.portable.step", (*_DELTA, *_SSD), "rows, tree")

DECODES: KernelTable[MixerPart] = KernelTable(
    row("delta decode, Hopper", "recurrent.hopper.delta_decode", _DELTA, "4 rows, warps",
        _DELTA_STATES, _REACHED, _SILU, needs=HOPPER),
    _STEP,
)
"""Kernels for steps in which each sequence decodes one token. On Hopper one kernel serves any
number of sequences, since Triton and Gluon add up squares in different orders."""
VERIFIES: KernelTable[MixerPart] = KernelTable(
    row("delta verify, Hopper", "recurrent.hopper.delta_verify", _DELTA, "4 rows, warps",
        _DELTA_STATES, _REACHED, _SILU, needs=HOPPER),
    row("mamba2 verify, Hopper", "recurrent.hopper.mamba2_verify", _SSD, "4 columns, warps",
        _SSD_STATES, _REACHED, needs=HOPPER),
    _STEP,
)
"""Kernels for steps that may verify drafts."""
STATES: KernelTable[MixerPart] = KernelTable(
    row("chunk_h, Hopper", "recurrent.hopper.chunk_h", _DELTA, "64 seq",
        _KEYS, _HALF, _LONG, needs=HOPPER),
    row("chunk_h", "recurrent.portable.chunk_h", _DELTA, "64 seq"),
    row("ssd", "recurrent.portable.ssd", _SSD, "chunk seq", entry="chunk_fwd_h"),
)
"""Kernels that pass a prefill's states from chunk to chunk. Mamba2's two rows here and in `OUTPUTS`
are launched together."""
OUTPUTS: KernelTable[MixerPart] = KernelTable(
    row("chunk_o", "recurrent.portable.delta", _DELTA, "state, tokens", entry="chunk_fwd_o"),
    row("ssd", "recurrent.portable.ssd", _SSD, "state, tokens", entry="chunk_fwd_o"),
)
"""Kernels for the outputs of a prefill's tokens."""
# fmt: on

TABLES = {
    "decode": DECODES,
    "verify": VERIFIES,
    "prefill, states": STATES,
    "prefill, outputs": OUTPUTS,
}
