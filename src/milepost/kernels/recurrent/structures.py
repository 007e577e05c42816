"""The arguments of recurrent kernels, grouped by what they belong to.

Kernels take these as they are: a field is read by its name on the device too. `base` is a tensor on
the host and a pointer on the device (a field named `values` would be hidden by Triton's tuples).

Legend: S sequences, T tokens, N chunks, L tiles, E exports, C channels, J taps, U units, K entries
that a state is read along, W entries of a head's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from milepost.kernels.platform.tiles import next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.kernels.layout.chunks import ChunkLayout
    from milepost.kernels.recurrent.weights import Weights


class ProjectedRows(NamedTuple):
    """Some columns of a projection, [T, columns], `stride` from token to token."""

    base: Any
    stride: Any
    recorded: Any = 0
    """First of these columns in a draft's record."""


class MixerInputs(NamedTuple):
    """All that a mixer reads of a token."""

    mixed: ProjectedRows
    """Inputs of the convolution [T, C]."""
    strengths: ProjectedRows
    """Beta inputs, or Mamba2's time-step inputs, one per head."""
    decays: ProjectedRows
    """Decay inputs: one per head (Gated DeltaNet), one per key channel (KDA), none (Mamba2)."""
    gate: ProjectedRows
    """Inputs of the output's gate [T, U * GROUP * W]; not recorded."""


class SlotStates(NamedTuple):
    """States of all slots, `stride` from slot to slot."""

    base: Any
    stride: Any


class Sequences(NamedTuple):
    """The decoding sequences, int32 arrays [S]. The first four are None if none has drafts."""

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
    """Drafts of the step before: [rows, drafts, columns], `stride` from draft to draft."""

    base: Any
    row_stride: Any
    stride: Any


class StepOutput(NamedTuple):
    """Where a token's output goes."""

    read: Any
    """[T, U * GROUP * W] float32, before the norm; None where heads are normed one by one."""
    base: Any
    """[T, U * GROUP * W]"""
    rounded: Any = None
    """`RoundedOutput`, if outputs are rounded too."""


class RoundedOutput(NamedTuple):
    """Where outputs rounded to FP8 go. The stride of scales is an argument of its own, so that
    kernels are not compiled anew for it."""

    base: Any
    """[T, V * W], in kernels for any chip the numbers' bits."""
    scales: Any
    """[V, T] float32"""


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
    """Tensors that the launches of a delta rule's prefill hand on."""

    query_key: Any
    """[2 * U, T, K], unit vectors; KDA's are then decayed, queries from their chunk's begin, keys
    to its end."""
    v: Any
    """[V, T, W], values; then what tokens add for their keys as if the state before the chunk were
    zero; at last what they do add."""
    w: Any
    """[V, T, K], times the state before the chunk what tokens add less."""
    decay: Any
    """[V, T] float32, sums of log decays from the chunk's begin; or, by channel, [N, V, K], decays
    over the whole chunk."""
    h: Any
    """[N, V, K, W], the states before chunks."""
    scores: Any = None
    """[V, T, C], decayed products of queries and keys, zero for later keys; None if made later."""


class MixerSizes(NamedTuple):
    """The shape of a mixer; a constant on the device. Its properties only name what the fields say:
    Triton's cache knows the fields alone.

    A *unit* is what shares one key and query (or B and C) and finishes together: a key head with
    its value heads, a KDA head, a Mamba2 group.
    """

    units: int
    group: int
    """Heads of a unit."""
    shared: int
    """K: entries of the shared vectors."""
    own: int
    """W: entries of a head's value and output."""
    shared_tile: int
    own_tile: int
    """Tiles of K and W in kernels that work by chunks: see `tile_of`."""
    shared_stride: int
    own_stride: int
    """Strides of a head's state."""
    first_read: int
    first_write: int
    first_own: int
    """First channel of queries (C), of keys (B), and of values (x)."""
    channels: int
    strengths: int
    decays: int
    """Columns of `MixerInputs`."""
    norms_heads: bool
    """Whether each head is normed by itself, and queries and keys are unit vectors (the delta
    rule); else all heads of a unit are normed together."""
    taps: int
    max_beta: float = 1.0
    """Factor of the delta rule's betas."""
    least_decay: float = 0.0
    """The number that KDA's log decays stay above; 0 if there is none."""
    gates_first: bool = False
    """Whether heads are gated before they are normed."""

    @property
    def heads(self) -> int:
        return self.units * self.group

    @property
    def width(self) -> int:  # of a token's output
        return self.heads * self.own

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a key decays by itself (KDA)."""
        return self.decays > self.heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixer:
    """A layer's mixer in a step: its inputs, small weights and sizes, and its rule."""

    inputs: MixerInputs
    weights: Any
    """A named tuple of what kernels read."""
    sizes: MixerSizes
    rule: MixerRule
    rule_of: type[Weights]
    batch_invariant: bool = False
    gates_by_sigmoid: bool = False
    """See `Recurrence`."""


class MixerRule(NamedTuple):
    """A mixer's own arithmetic, as functions of the device.

    `open_head(weights, head, o_shared, o_own, SIZES, HEADS)` reads what does not change from token
    to token. `strengths(streams, place, head, weights, SIZES, VERIFIES)` returns how strongly a
    token is written, and the decay before that; `advance(b_state, vectors, b_strength, b_decay)`
    the state after the token, in memory's order of rows and columns; `read(b_state, vectors, head)`
    what the token reads of it [W]. `finish(y, weight, gate, eps, WIDTH)` norms and gates rows.
    """

    open_head: Any
    strengths: Any
    advance: Any
    read: Any
    finish: Any


class DecodingSteps(NamedTuple):
    """The decoding sequences of a step, and what they read and write of a layer."""

    conv: SlotStates
    recurrent: SlotStates
    sequences: Sequences
    records: DraftRecords | None
    """None in a step without drafts."""

    @property
    def num_drafts(self) -> int:
        """Room for the drafts of a sequence."""
        return 0 if self.records is None else int(self.records.base.shape[1])

    @property
    def num_places(self) -> int:
        """Tokens of a sequence at most, recorded ones and new ones."""
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
        """Sequences [6, S] as a `VerifyLayout` has them."""
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


def tile_of(size: int) -> int:
    """Returns the tile of a size, at least 64: for narrower 16-bit tiles, triton 3.6 reads beyond
    shared memory in `wy_fwd`."""
    return max(64, next_power_of_2(size))


def slot_states(pool: Tensor) -> SlotStates:
    return SlotStates(pool, pool.stride(0))
