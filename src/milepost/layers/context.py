"""What a layer needs to know about one step.

Built once a step by the runner and passed down; layers keep no state of their own.

Legend: T tokens of the step, S sequences, R tokens behind which is sampled, each with its capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from milepost.kernels.batch import Operation
from milepost.kernels.mtp import Carried


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape of an attention layer's cache: one tensor [pages, rows_each, page_size, num_kv_heads,
    head_dim], contiguous but from page to page.
    """

    num_kv_heads: int
    head_dim: int
    rows_each: int = 2
    """Of a token: its key and its value; or one, the latent of both."""

    @property
    def takes_drafts(self) -> bool:
        """Whether a step may verify: KV of drafts that were rejected is written again."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Shapes of a recurrent layer's state, without the leading slot dimension.

    `conv_shape` [channels, kernel - 1] holds the last inputs of the short convolution, oldest
    first, in the model's dtype; `recurrent_shape`, heads first, is in the state dtype. At multiples
    of `grid` a prefill can keep states without a chunk that ends early.
    """

    conv_shape: tuple[int, ...]
    recurrent_shape: tuple[int, ...]
    grid: int
    record_size: int | None = None
    """Numbers in the model's dtype that are recorded of a draft; None where the layer's kernels
    cannot take drafts."""
    takes_drafts_fused: bool = True
    """Whether its fused kernels can too, if the reference can."""

    @property
    def takes_drafts(self) -> bool:
        return self.record_size is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """Shape of a short convolution's state, which lies beside each page: `conv_shape` [channels,
    kernel - 1], its last inputs, oldest first, in the model's dtype.
    """

    conv_shape: tuple[int, ...]

    @property
    def takes_drafts(self) -> bool:
        """Whether a step may verify: the inputs before a draft and its own are recorded."""
        return True

    @property
    def record_size(self) -> int:
        """Numbers in the model's dtype of one input."""
        return self.conv_shape[0]

    def num_recorded(self, num_drafts: int) -> int:
        """Inputs that are recorded: those that the first of so many drafts is convolved with, and
        their own."""
        return self.conv_shape[1] + num_drafts


LayerSpec = AttentionSpec | RecurrentSpec | ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A recurrent layer's pool: `conv` [slots, *conv_shape], `recurrent` [slots,
    *recurrent_shape], contiguous but from slot to slot; and `records` [rows, drafts, record_size],
    None where nothing is drafted.
    """

    conv: Tensor
    recurrent: Tensor
    records: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """What is known of a step on the device: int arrays in numpy on the host, tensors once the
    runner has sent them.

    Sequences stand one behind the other, those that decode first; what lies past the step's own
    tokens and sequences is padding, which no kernel touches.
    """

    token_ids: Any
    """[T] int64"""
    positions: Any
    """[T] int32"""
    kv_rows: Any
    """[T] int64, row to which each token's key is written (see `kernels.attention.pages`), -1 for
    nowhere."""
    slot_in: Any
    """[S] int32"""
    slot_out: Any
    """[S] int32, -1 for padding."""
    num_real: Any
    """[1] int32, tokens that are not padding."""
    last_tokens: Any
    """[R] int64, the tokens behind which is sampled come first."""
    sources: Any
    """[S] int64, where a step ahead finds its tokens in the one before."""
    layouts: Mapping[Operation, Any]
    """What each operation of the model has laid out."""
    num_sampled: Any
    """[1] int32, tokens behind which is sampled."""
    decodes: bool
    """Every sequence decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A step, and the memory that it reads and writes."""

    step: StepArrays
    tables: Tensor | None
    """[rows, pages] int32, page tables on the device; None for the reference kernels, which have
    what they need of them in their layouts."""
    kv: Mapping[int, Tensor]
    """Number of a mixer -> its pool of KV."""
    states: Mapping[int, RecurrentState]
    """Number of a mixer -> its pools of states."""
    conv_states: Mapping[int, Tensor]
    """Number of a mixer -> its pool [1 + pages, *conv_shape] of states beside pages, behind zeros.
    """
    carried: Carried | None = None
    """Hidden states for an MTP head; None where there is none."""
    conv_records: Mapping[int, Tensor] = field(default_factory=dict)
    """Number of a mixer -> inputs [rows, num_recorded, channels] of the drafts that its states
    beside pages may have to take in; none where nothing is drafted."""
    only_ends: bool = False
    """Behind the last layer that has a cache, only rows behind which is sampled go on."""
    angles: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rotary embedding -> cosines and sines of the step's positions; the model's to fill."""

    def at_ends(self) -> Context:
        """For the rows [R, C] that go on where only ends do; their layers have no cache."""
        return replace(self, step=replace(self.step, num_real=self.step.num_sampled))

    @property
    def num_real(self) -> Tensor | None:
        """[1] tokens that are not padding; None for the reference kernels, which get none."""
        return None if self.tables is None else self.step.num_real

    @property
    def decodes(self) -> bool:
        """Whether every sequence decodes. What follows a projection then starts before it ends;
        kernels of a prefill would crowd where there is room."""
        return self.step.decodes
