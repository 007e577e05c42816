"""Small weights of token mixers, and four tables of the kernels that serve them: steps of sequences
that decode, without and with drafts; a prefill's states from chunk to chunk, and what its tokens
read.

A row's entry, `run` if it names none, launches its kernel: steps with `(mixer, steps, output,
arrivals)`, states with `(mixer, chunk, pool, chunks, tensors)`, outputs with `(mixer, chunk,
chunks, tensors, output)`. Nothing here needs a GPU, or Triton.

Legend: T tokens, C channels, J taps, K entries that a state is read along, W entries of a head's
output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.kernels.platform.device import Chip, why_no_gluon
from milepost.kernels.platform.tables import HOPPER, Condition, Kernel, KernelTable, SumOrder, row

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
class GatedDeltaWeights:
    """Small weights of a Gated DeltaNet layer. Legend: V value heads, W value_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[V] float32, negative: the factor of softplus in a log decay."""
    decay_bias: Tensor
    """[V] float32, added before softplus."""
    norm: Tensor
    """[W] float32."""
    norm_eps: float
    max_beta: float = 1.0
    """Factor of a beta's sigmoid."""
    gates_by_sigmoid: bool = False
    """Whether outputs are multiplied by the gate's sigmoid instead of its SiLU. The Hopper kernels
    support SiLU only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAWeights:
    """Small weights of a KDA layer. Legend: C = 3 * H * K channels, H heads, K head_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    decay_rate: Tensor
    """[H] float32, negative: the factor of softplus in a log decay."""
    decay_bias: Tensor
    """[H * K] float32, added before softplus."""
    norm: Tensor
    """[K] float32."""
    norm_eps: float
    least_decay: float = 0.0
    """Lower bound of log decays, 0 for none. With a bound a log decay is bound * sigmoid(-rate *
    input), without one rate * softplus(input)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Weights:
    """Small weights of a Mamba2 layer. Legend: H heads, P head_dim."""

    conv: Tensor
    """[C, J], any float type, contiguous."""
    conv_bias: Tensor | None
    """[C], likewise."""
    rate: Tensor
    """[H] float32, negative: the published A."""
    dt_bias: Tensor
    """[H] float32, added before softplus."""
    skip: Tensor
    """[H] float32: the published D."""
    norm: Tensor | None
    """[H * P] float32. If None, outputs are gated but not normed."""
    norm_eps: float
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of time steps."""
    order: SumOrder = SumOrder.FREE
    """If FIXED, tiles do not depend on the number of sequences."""


Weights = GatedDeltaWeights | KDAWeights | Mamba2Weights


class KDAProjected(NamedTuple):
    """Outputs of KDA's projections. Legend: H heads, K head_dim."""

    rows: Tensor
    """[T, C + H]: queries, keys, values (the C channels), heads side by side, and betas before
    their sigmoid."""
    decays: Tensor
    """[T, H * K], inputs of log decays; rows may lie apart."""
    gate: Tensor
    """[T, H * K], the output's gate before its sigmoid; rows may lie apart."""


MixerProjections = Tensor | KDAProjected
"""Outputs of a mixer's input projections, heads side by side. Gated DeltaNet [T, C + V * W + 2 *
V]: queries, keys and values (the C channels), output gates, betas [V] before their sigmoid, decay
inputs [V]. Mamba2 [T, H * P + C + H]: gates, then x, B and C (the C channels), time steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Properties of a layer's recurrence that decide which kernel runs."""

    rule: type[Weights]
    num_units: int
    """Key heads, or groups."""
    num_heads: int
    shared: int
    """K"""
    own: int
    """W"""
    gates_by_sigmoid: bool = False
    """See `GatedDeltaWeights`."""

    @property
    def group(self) -> int:
        return self.num_heads // self.num_units

    @property
    def state(self) -> tuple[int, int]:
        return self.shared, self.own


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPart:
    """A part of a mixer's work in a step: the problem that the tables choose a kernel for."""

    recurrence: Recurrence
    num: int
    """Sequences of a decode or verify, tokens of a prefill."""
    element_bytes: int = 2
    chunk: int = CHUNK
    is_reached: bool = True
    """Whether TMA can load the states: see `is_reached`."""

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
    not it.recurrence.gates_by_sigmoid)
_HALF: Condition[MixerPart] = ("not 16 bits and chunks of 64", lambda it, _:
    it.element_bytes == 2 and it.chunk == CHUNK)
_LONG: Condition[MixerPart] = (f"up to {HOST_BOUND_TOKENS} tokens", lambda it, _:
    it.num > HOST_BOUND_TOKENS)
_KEYS: Condition[MixerPart] = ("keys are not of 128", lambda it, _:
    it.recurrence.shared == _DELTA_STATE[0] and it.recurrence.own % _COLUMNS == 0)
_DELTA_STATES: Condition[MixerPart] = ("states are not {} x {}".format(*_DELTA_STATE), lambda it, _:
    it.recurrence.state == _DELTA_STATE)
_SSD_STATES: Condition[MixerPart] = ("states are not {} x {}".format(*_SSD_STATE), lambda it, _:
    it.recurrence.state == _SSD_STATE)

_DELTA, _SSD = (GatedDeltaWeights, KDAWeights), (Mamba2Weights,)
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
