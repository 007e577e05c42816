"""What pages and slots hold: shapes and bytes, before there is any memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from milepost.kernels.gated_delta import CHUNK
from milepost.layers.context import AttentionSpec, LayerSpec, RecurrentSpec, ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What one page and one slot hold, over all layers; layers of a kind have one shape in every
    model that there is."""

    specs: tuple[LayerSpec, ...]
    page_size: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    carried_size: int = 0
    """Numbers of `dtype` that a slot carries for an MTP head."""
    num_record_rows: int = 0
    """Requests whose drafts are recorded at a time, in every recurrent layer."""
    num_drafts: int = 0
    """Of each, at most."""
    kv_dtype: torch.dtype | None = None
    """Of keys and values, where it is not `dtype`."""

    @property
    def attention(self) -> list[AttentionSpec]:
        """Of every attention layer."""
        specs = [spec for spec in self.specs if isinstance(spec, AttentionSpec)]
        assert len(set(specs)) <= 1, "attention layers have one shape"
        return specs

    @property
    def recurrent(self) -> list[RecurrentSpec]:
        """Of every recurrent layer."""
        specs = [spec for spec in self.specs if isinstance(spec, RecurrentSpec)]
        assert len(set(specs)) <= 1, "recurrent layers have one shape"
        return specs

    @property
    def convolutions(self) -> list[ShortConvSpec]:
        """Of every layer whose state lies beside pages."""
        specs = [spec for spec in self.specs if isinstance(spec, ShortConvSpec)]
        assert len(set(specs)) <= 1, "short convolutions have one shape"
        return specs

    @property
    def uses_slots(self) -> bool:
        """Whether requests need slots. Those of a model of attention alone hold nothing."""
        return bool(self.recurrent) or not self.convolutions

    @property
    def grid(self) -> int:
        """At its multiples a prefill can keep states."""
        return next((spec.grid for spec in self.recurrent), CHUNK)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[attention layers, rows_each, page_size, num_kv_heads, head_dim]: keys, then values; or
        latents."""
        layers = self.attention
        assert layers, "pages are for attention"
        spec = layers[0]
        return (len(layers), spec.rows_each, self.page_size, spec.num_kv_heads, spec.head_dim)

    @property
    def dtype_of_kv(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page and of what lies beside it."""
        return self.kv_bytes + self.conv_bytes

    @property
    def conv_bytes(self) -> int:
        """Bytes beside one page, of all short convolutions."""
        return sum(prod(spec.conv_shape) for spec in self.convolutions) * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one page in all attention layers."""
        return prod(self.page_shape) * self.dtype_of_kv.itemsize if self.attention else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of all records together."""
        row_bytes = self.num_drafts * self.record_token_bytes
        if self.num_drafts:
            sizes = [s.num_recorded(self.num_drafts) * s.record_size for s in self.convolutions]
            row_bytes += sum(sizes) * self.dtype.itemsize
        return self.num_record_rows * row_bytes

    @property
    def record_token_bytes(self) -> int:
        """Bytes that one draft's record takes, in layers with states in slots and for a head."""
        sizes = [spec.record_size or 0 for spec in self.recurrent]
        return (sum(sizes) + self.carried_size) * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: in all recurrent layers, and what it carries."""
        return self.carried_size * self.dtype.itemsize + sum(
            prod(spec.conv_shape) * self.dtype.itemsize
            + prod(spec.recurrent_shape) * self.state_dtype.itemsize
            for spec in self.recurrent
        )
