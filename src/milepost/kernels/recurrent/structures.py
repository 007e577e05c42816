"""Arguments of the recurrent kernels, in named groups.

Kernels read fields by name. `base` is a tensor on the host and a pointer on the device (Triton's
tuples would hide a field named `values`).

Legend: S sequences, T tokens, N chunks, L tiles, E exports, C channels, J taps, U units, K entries
that a state is read along, W entries of a head's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.recurrent.mixer import MixerSizes, Weights


class ProjectedRows(NamedTuple):
    """Some columns of a projection [T, columns], with `stride` elements between tokens."""

    base: Any
    stride: Any
    recorded: Any = 0
    """Where these columns begin in a draft's record."""


class MixerInputs(NamedTuple):
    """Everything that a mixer reads per token."""

    mixed: ProjectedRows
    """Inputs of the convolution [T, C]."""
    strengths: ProjectedRows
    """Beta inputs, or Mamba2's time-step inputs, one per head."""
    decays: ProjectedRows
    """Decay inputs: one per head (Gated DeltaNet), one per key channel (KDA), none (Mamba2)."""
    gate: ProjectedRows
    """Inputs of the output's gate [T, U * GROUP * W]; not recorded."""


class SlotStates(NamedTuple):
    """States of all slots, with `stride` elements between slots."""

    base: Any
    stride: Any


class Sequences(NamedTuple):
    """The decoding sequences, int32 arrays [S]. The first four are None in steps without drafts."""

    begin: Any
    """First token of the step."""
    length: Any
    """Tokens of the step: one and its drafts."""
    fold: Any
    """Recorded tokens to fold in first."""
    row: Any
    """Row of the records."""
    slot_in: Any
    slot_out: Any
    """-1 for padding."""


class DraftRecords(NamedTuple):
    """The previous step's drafts [rows, drafts, columns], `stride` elements between drafts."""

    base: Any
    row_stride: Any
    stride: Any


class StepOutput(NamedTuple):
    """Destination of a token's output."""

    read: Any
    """[T, U * GROUP * W] float32, before the norm; None where heads are normed one by one."""
    base: Any
    """[T, U * GROUP * W]"""


class PrefillChunks(NamedTuple):
    """A prefill's chunks and its sequences' slots, int32 arrays."""

    first: Any
    """[S + 1], first chunk of each sequence."""
    begin: Any
    """[N], first token of each chunk."""
    size: Any
    """[N], its tokens; 0 past the last, and -n for n tokens that no sequence has."""
    export: Any
    """[N], slot to which the state after the chunk is exported, or -1."""
    slot_in: Any
    slot_out: Any


class PrefillTiles(NamedTuple):
    """A prefill's tiles and its sequences' slots, int32 arrays: see `layout.chunks`."""

    sequence_begin: Any
    """[S + 1]"""
    sequence: Any
    """[L], -1 past the last."""
    begin: Any
    """[L]"""
    export: Any
    """[L + 1], the exports from this one up to the next tile's are the tile's."""
    export_end: Any
    """[E]"""
    export_slot: Any
    """[E]"""
    slot_in: Any
    slot_out: Any


class ChunkTensors(NamedTuple):
    """Intermediate tensors of a prefill with the delta rule."""

    query_key: Any
    """[2 * U, T, K], unit queries and keys. KDA's are decayed: queries from the chunk's begin, keys
    to its end."""
    v: Any
    """[V, T, W]: values; then u, what tokens would add to a zero state; then what they do add."""
    w: Any
    """[V, T, K]. Times the state before the chunk it is what tokens add less than u."""
    decay: Any
    """[V, T] float32, sums of log decays in the chunk; by channel [N, V, K], whole decays."""
    h: Any
    """[N, V, K, W], the states before chunks."""
    scores: Any = None
    """[V, T, C], decayed products of queries and keys, zero for later keys; None if the last launch
    makes them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixer:
    """A layer's mixer in a step: its inputs, small weights and sizes, and its rule's functions."""

    inputs: MixerInputs
    weights: Weights
    sizes: MixerSizes
    rule: RuleFunctions
    order: SumOrder


class RuleFunctions(NamedTuple):
    """Device functions with a rule's arithmetic. Each one is a constant of the kernels.

    `open_head(weights, head, o_shared, o_own, SIZES, HEADS)` loads a head's small weights.
    `strengths(streams, place, head, weights, SIZES, VERIFIES)` returns the strength with which a
    token is written and the decay applied before it. `advance(b_state, vectors, b_strength,
    b_decay)` returns the state after the token, rows and columns as in memory. `read(b_state,
    vectors, head)` returns what the token reads of that state [W].
    """

    open_head: Any
    strengths: Any
    advance: Any
    read: Any


class DecodingSteps(NamedTuple):
    """The decoding sequences of a step, with a layer's states, and its records of drafts if any."""

    conv: SlotStates
    recurrent: SlotStates
    sequences: Sequences
    records: DraftRecords | None

    @property
    def num_drafts(self) -> int:
        """Largest number of drafts of a sequence."""
        return 0 if self.records is None else int(self.records.base.shape[1])

    @property
    def num_places(self) -> int:
        """Largest number of tokens of a sequence, recorded ones included."""
        return 2 * self.num_drafts + 1


class LayerStates(NamedTuple):
    """A layer's pools, and the slots of a step's sequences."""

    conv: Tensor
    """[slots, C, J - 1]"""
    recurrent: Tensor
    """[slots, heads, ...]"""
    slot_in: Tensor
    slot_out: Tensor
    """[S] of any integer type, -1 for padding."""
    records: Tensor | None = None
    """[rows, drafts, ...]"""

    def decodes(self) -> DecodingSteps:
        """Returns a step in which each sequence takes one token."""
        sequences = Sequences(None, None, None, None, self.slot_in, self.slot_out)
        return DecodingSteps(slot_states(self.conv), slot_states(self.recurrent), sequences, None)

    def verifies(self, sequences: Tensor) -> DecodingSteps:
        """Returns a step that verifies `sequences` [6, S], ordered as in `VerifyLayout`."""
        assert self.records is not None, "V1: only mixers that keep records verify"
        records = DraftRecords(self.records, *self.records.stride()[:2])
        own = Sequences(*sequences.unbind())
        return DecodingSteps(slot_states(self.conv), slot_states(self.recurrent), own, records)

    def chunks(self, layout: ChunkLayout) -> PrefillChunks:
        where = layout.sequence_chunk, layout.chunk_begin, layout.chunk_size, layout.chunk_slot
        return PrefillChunks(*where, self.slot_in, self.slot_out)

    def tiles(self, layout: ChunkLayout) -> PrefillTiles:
        where = layout.sequence_begin, layout.tile_sequence, layout.tile_begin
        exports = layout.tile_export, layout.export_end, layout.export_slot
        return PrefillTiles(*where, *exports, self.slot_in, self.slot_out)


def slot_states(pool: Tensor) -> SlotStates:
    return SlotStates(pool, pool.stride(0))
