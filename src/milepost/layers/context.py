"""What a layer needs to know about one step's batch.

Built once a step by the runner and passed down; layers keep no state of their own. The batch is a
flat list of tokens, sequence after sequence, and decoding sequences (exactly one token each,
nothing to export) come first.

Legend: T tokens in the batch, S sequences, D decoding sequences (the first D of S), P pages in the
longest page table, E exports, W tokens whose KV is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.gated_delta.fused import FusedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape of an attention layer's cache: one tensor [pages, 2, page_size, num_kv_heads,
    head_dim], contiguous but from page to page.
    """

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Shapes of a recurrent layer's state, without the leading slot dimension.

    `conv_shape` [channels, kernel - 1] holds the last inputs of the short convolution, oldest
    first, in the model's dtype; `recurrent_shape` [value_heads, key_dim, value_dim] is in the state
    dtype.
    """

    conv_shape: tuple[int, ...]
    recurrent_shape: tuple[int, ...]


LayerSpec = AttentionSpec | RecurrentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A recurrent layer's pool: `conv` [slots, *conv_shape], `recurrent` [slots,
    *recurrent_shape], contiguous but from slot to slot.
    """

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateExport:
    """Write the state of `sequence` (index in the batch) after exactly `position` tokens to `slot`.

    start < position <= start + length of that sequence's new tokens; multiples of 64 are cheapest.
    """

    sequence: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """One step's batch. Tensors are on the model's device; tuples are the host's copies of the same
    facts.
    """

    num_decodes: int
    starts: tuple[int, ...]
    """[S] position of each sequence's first new token."""
    lengths: tuple[int, ...]
    """[S] new tokens of each sequence."""
    positions: Tensor
    """[T] int64, absolute position of each token."""
    cu_seqlens: Tensor
    """[S + 1] int32, where each sequence's tokens begin in the batch."""
    page_table: Tensor
    """[S, P] int64, padded with page 0."""
    kv_lengths: Tensor
    """[S] int64, start + length: tokens that a sequence's last new token may attend to, itself
    included.
    """
    kv_write_tokens: Tensor
    """[W] int64, indices into the batch's tokens whose KV is written."""
    kv_write_rows: Tensor
    """[W] int64, row to which each of their keys is written (see `kernels.attention.pages`)."""
    slot_in: Tensor
    """[S] int64, slot that each sequence's state is read from (0: zeros)."""
    slot_out: Tensor
    """[S] int64, slot that each sequence's state is written to; may equal slot_in; never 0."""
    exports: tuple[StateExport, ...] = ()
    kv: dict[int, Tensor] = field(default_factory=dict)
    """Layer index -> KV pool of that attention layer."""
    states: dict[int, RecurrentState] = field(default_factory=dict)
    """Layer index -> state pool of that recurrent layer."""

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def num_real(self) -> None:
        """No token is padding."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """What the fused kernels read of a step: int arrays in numpy, then tensors on the device.

    Sequences stand one behind the other as in `BatchContext`; what lies past the step's own tokens
    and sequences is padding, which no kernel touches.
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
    """[S] int64, the tokens behind which is sampled come first."""
    sources: Any
    """[S] int64, where a step ahead finds its tokens in the one before."""
    attention: AttentionItems | None
    recurrent: FusedLayout | None
    """None where every sequence decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """One step's batch for the fused kernels."""

    step: StepArrays
    tables: Tensor
    """[rows, pages] int32, page tables that the attention items name rows of."""
    kv: dict[int, Tensor]
    states: dict[int, RecurrentState]

    @property
    def positions(self) -> Tensor:
        return self.step.positions

    @property
    def num_real(self) -> Tensor:
        return self.step.num_real

    @property
    def decodes(self) -> bool:
        """Whether every sequence decodes. What follows a projection then starts before it ends;
        kernels of a prefill would crowd where there is room."""
        return self.step.recurrent is None
