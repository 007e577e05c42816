"""The data that a layer needs about one step.

Built once a step by the runner and passed down; layers keep no state of their own.

Legend: T tokens of the step, S sequences, R sampled positions, each with its capacity; C hidden
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from milepost.kernels.layout.batch import Operation
from milepost.kernels.mtp import Carried
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.recurrent import LayerStates


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape of an attention layer's cache: one tensor [pages, rows_each, page_size, num_kv_heads,
    head_dim], contiguous within a page."""

    num_kv_heads: int
    head_dim: int
    rows_each: int = 2
    """Rows per token: two for its key and value, one for the latent of both, or three with an index
    key after key and value."""
    window: int | None = None
    """Number of tokens that a token attends to, if not all before it. The KV is then in window
    pages."""

    @property
    def is_indexed(self) -> bool:
        """Whether pages hold index keys."""
        return self.rows_each > 2

    @property
    def takes_drafts(self) -> bool:
        """Whether a step may verify drafts. KV of rejected drafts is overwritten, so it always
        may."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Shapes of a recurrent layer's state, without the leading slot dimension.

    `conv_shape` [channels, kernel - 1] holds the last inputs of the short convolution, oldest
    first, in the model's dtype; `recurrent_shape`, heads first, is in the state dtype. At multiples
    of `grid` a prefill can save states without cutting a chunk short.
    """

    conv_shape: tuple[int, ...]
    recurrent_shape: tuple[int, ...]
    grid: int
    record_size: int | None = None
    """Values recorded per draft, in the model's dtype; None if the layer's kernels cannot verify
    drafts."""
    num_before: int = 0
    """Number of records besides those of drafts: inputs that the first draft is convolved with."""
    takes_drafts_fused: bool = True
    """Whether the fused kernels verify drafts as well, if the reference does."""

    @property
    def takes_drafts(self) -> bool:
        return self.record_size is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """Shape of a short convolution's state, which is stored with each page: `conv_shape` [channels,
    kernel - 1] holds its last inputs, oldest first, in the model's dtype."""

    conv_shape: tuple[int, ...]

    @property
    def takes_drafts(self) -> bool:
        """Whether a step may verify drafts. It always may: the inputs before the first draft and
        those of the drafts are recorded."""
        return True

    @property
    def record_size(self) -> int:
        """Values of one input, in the model's dtype."""
        return self.conv_shape[0]

    def num_recorded(self, num_drafts: int) -> int:
        """Returns the number of inputs recorded for `num_drafts` drafts: those that the first draft
        is convolved with, and the drafts' own."""
        return self.conv_shape[1] + num_drafts


LayerSpec = AttentionSpec | RecurrentSpec | ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A recurrent layer's pools: `conv` [slots, *conv_shape] and `recurrent` [slots,
    *recurrent_shape], both contiguous within a slot. `records` [rows, drafts, record_size] are
    those of drafts; None if nothing is drafted."""

    conv: Tensor
    recurrent: Tensor
    records: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """A step's data on the device: int arrays in numpy on the host, tensors once the runner has
    sent them.

    Sequences are stored one after another, those that decode first. Entries past the step's own
    tokens and sequences are padding, which no kernel touches.
    """

    token_ids: Any
    """[T] int64"""
    positions: Any
    """[T] int32, rotary positions: a token's index in its sequence, minus what the pictures before
    it save. A picture's tokens have its position in time."""
    kv_rows: Any
    """[T] int64, the row that each token's key is written to (see `kernels.attention.pages`); -1
    for none."""
    window_rows: Any = None
    """[T] int64, likewise among the window pages of layers with a sliding window; None if there are
    none."""
    slot_in: Any
    """[S] int32"""
    slot_out: Any
    """[S] int32, -1 for padding."""
    num_real: Any
    """[1] int32, number of tokens that are not padding."""
    last_tokens: Any
    """[R] int64, indices of the tokens that are sampled after, ahead of any padding."""
    sources: Any
    """[S] int64, for a step planned ahead: where each sequence's tokens are found in the previous
    step."""
    layouts: Mapping[Operation, Any]
    """The layout of each of the model's operations."""
    num_sampled: Any
    """[1] int32, number of tokens that are sampled after."""
    decodes: bool
    """Whether every sequence decodes."""
    order: SumOrder = SumOrder.FREE
    """Order of sums in this step, or the model's own if it is stricter. Prefills have LIKE_MANY in
    models whose operations all can (see `models.many`): the few rows after a cache hit then have
    the bits of a cold run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRows:
    """The tokens of a step that stand for pictures; there are N of them."""

    tokens: Tensor
    """[N] int64, the tokens' indices in the step."""
    embeddings: Tensor
    """[N, C] in the model's dtype, from the vision tower."""
    positions: Tensor
    """[2, N] int32, the rotary positions of the tokens' rows and columns. Not read by models whose
    tokens have one position each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A step, and the memory that it reads and writes."""

    step: StepArrays
    tables: Tensor | None
    """[rows, pages] int32, page tables on the device; None for the reference kernels, whose layouts
    hold the entries that they need."""
    kv: Mapping[int, Tensor]
    """Maps a mixer's number to its pool of KV."""
    states: Mapping[int, RecurrentState]
    """Maps a mixer's number to its pools of states."""
    conv_states: Mapping[int, Tensor]
    """Maps a mixer's number to its pool [1 + pages, *conv_shape] of states stored with pages; the
    first entry is zeros."""
    carried: Carried | None = None
    """Hidden states for an MTP head; None if the model has none."""
    conv_records: Mapping[int, Tensor] = field(default_factory=dict)
    """Maps a mixer's number to recorded inputs [rows, num_recorded, channels] of drafts, from which
    states stored with pages can be advanced over accepted drafts; empty if nothing is drafted."""
    last_tokens_only: bool = False
    """Whether only sampled positions are computed after the last layer that has a cache."""
    pictures: PictureRows | None = None
    """Tokens that stand for pictures; None if there are none."""
    window_tables: Tensor | None = None
    """Like `tables`, for layers with a sliding window."""
    angles: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Maps a rotary embedding to cosines and sines of the step's positions; the model fills it."""

    def at_ends(self) -> Context:
        """Returns the context for the sampled rows [R, C], for layers after the last one with a
        cache."""
        return replace(self, step=replace(self.step, num_real=self.step.num_sampled))

    def layer_states(self, number: int) -> LayerStates:
        """Returns a recurrent mixer's pools with the step's slots."""
        state, step = self.states[number], self.step
        slots = step.slot_in, step.slot_out
        return LayerStates(state.conv, state.recurrent, *slots, state.records)

    @property
    def num_real(self) -> Tensor | None:
        """[1] number of tokens that are not padding; None for the reference kernels, which are
        given no padding."""
        return None if self.tables is None else self.step.num_real

    @property
    def decodes(self) -> bool:
        """Whether every sequence decodes. If so, the kernel after a projection starts before the
        projection ends; in a prefill, kernels that start early would crowd the running ones."""
        return self.step.decodes

    @property
    def order(self) -> SumOrder:
        """See `StepArrays`."""
        return self.step.order
