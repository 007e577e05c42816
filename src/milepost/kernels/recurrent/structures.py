"""The arguments of the step kernels, grouped by what they belong to.

Kernels take these as they are: a field is read by its name on the device too. `base` is a tensor on
the host and a pointer on the device (a field named `values` would be hidden by Triton's tuples).

Legend: S sequences, T tokens, C channels, J taps, U units, K entries that a state is read along, W
entries of a head's output.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ProjectedRows(NamedTuple):
    """Some columns of a projection, one row per token."""

    base: Any
    """[T, columns]"""
    stride: Any
    """Elements from one token's row to the next one's."""
    recorded: Any
    """First of these columns in a draft's record."""


class MixerInputs(NamedTuple):
    """All that a mixer reads of a token, apart from its output gate."""

    mixed: ProjectedRows
    """MixerInputs of the convolution [T, C]."""
    strengths: ProjectedRows
    """Beta inputs, or Mamba2's time-step inputs, one per head."""
    decays: ProjectedRows
    """Decay inputs: one per head (Gated DeltaNet), one per key channel (KDA), none (Mamba2)."""


class SlotStates(NamedTuple):
    """States of all slots."""

    base: Any
    stride: Any
    """Elements from one slot to the next."""


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
    """Drafts of the step before: [rows, drafts, columns]."""

    base: Any
    row_stride: Any
    stride: Any
    """Elements from one draft to the next."""


class StepOutput(NamedTuple):
    """Where a token's output goes."""

    read: Any
    """[T, U * GROUP * W] float32, before the norm."""
    gate: ProjectedRows
    base: Any
    """[T, U * GROUP * W]"""
    squares: Any = None
    """[T, U * GROUP, 4]: sums of squares of what four warps have read, if the norm takes them."""


class MixerSizes(NamedTuple):
    """The shape of a mixer; a constant on the device.

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
    shared_stride: int
    own_stride: int
    """Of a head's state in memory."""
    first_read: int
    first_write: int
    first_own: int
    """First channel of queries (C), of keys (B), and of values (x)."""
    channels: int
    strengths: int
    decays: int
    """Columns of `MixerInputs`."""
    norms_heads: bool
    """Whether each head is normed by itself, with the same weights, and queries and keys are unit
    vectors (the delta rule); else all heads of a unit are normed together."""
    taps: int
