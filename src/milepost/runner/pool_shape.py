"""Shapes and bytes of pages and slots, before any memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from milepost.cache.tree import num_window_pages, window_pages
from milepost.kernels.recurrent import CHUNK
from milepost.layers.context import AttentionSpec, LayerSpec, RecurrentSpec, ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """The contents of one page and one slot, over all layers. Layers of a kind have one shape in
    every existing model."""

    specs: tuple[LayerSpec, ...]
    page_size: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    carried_size: int = 0
    """Number of values of `dtype` that a slot carries for an MTP head."""
    num_record_rows: int = 0
    """Number of requests whose drafts are recorded at a time, in every recurrent layer."""
    num_drafts: int = 0
    """Largest number of recorded drafts per request."""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    """Token budget of a step, from which the number of window pages follows."""
    kv_dtype: torch.dtype | None = None
    """Type of keys and values, if it differs from `dtype`."""

    @property
    def attention(self) -> list[AttentionSpec]:
        """Specs of all layers that attend to every token before."""
        return [spec for spec in self._attention if spec.window is None]

    @property
    def windows(self) -> list[AttentionSpec]:
        """Specs of all layers with a sliding window."""
        return [spec for spec in self._attention if spec.window is not None]

    @property
    def _attention(self) -> list[AttentionSpec]:
        specs = [spec for spec in self.specs if isinstance(spec, AttentionSpec)]
        for are_windows in (False, True):
            matching = {spec for spec in specs if (spec.window is not None) == are_windows}
            assert len(matching) <= 1, "attention layers of a kind have one shape"
        return specs

    @property
    def recurrent(self) -> list[RecurrentSpec]:
        """Specs of all recurrent layers."""
        specs = [spec for spec in self.specs if isinstance(spec, RecurrentSpec)]
        assert len(set(specs)) <= 1, "recurrent layers have one shape"
        return specs

    @property
    def convolutions(self) -> list[ShortConvSpec]:
        """Specs of all layers whose state is stored with pages."""
        specs = [spec for spec in self.specs if isinstance(spec, ShortConvSpec)]
        assert len(set(specs)) <= 1, "short convolutions have one shape"
        return specs

    @property
    def uses_slots(self) -> bool:
        """Whether requests need slots. Slots of a model with attention only are empty."""
        return bool(self.recurrent) or not self.convolutions

    @property
    def window(self) -> int:
        """Tokens of the sliding windows; 0 if there are none."""
        return self.windows[0].window or 0 if self.windows else 0

    @property
    def grid(self) -> int:
        """Prefills can save states at multiples of this many tokens."""
        return next((spec.grid for spec in self.recurrent), CHUNK)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[attention layers, rows_each, page_size, num_kv_heads, head_dim]: keys, then values; or
        latents."""
        return self._shape_of(self.attention)

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Shape of a window page, like `page_shape`."""
        return self._shape_of(self.windows)

    def _shape_of(self, layers: list[AttentionSpec]) -> tuple[int, ...]:
        assert layers, "pages are for attention"
        spec = layers[0]
        return (len(layers), spec.rows_each, self.page_size, spec.num_kv_heads, spec.head_dim)

    @property
    def dtype_of_kv(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, including the states stored with it."""
        return self.kv_bytes + self.conv_bytes

    @property
    def conv_bytes(self) -> int:
        """Bytes of all short convolutions' states stored with one page."""
        return sum(prod(spec.conv_shape) for spec in self.convolutions) * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one page in all attention layers."""
        return prod(self.page_shape) * self.dtype_of_kv.itemsize if self.attention else 0

    @property
    def window_bytes(self) -> int:
        """Bytes of one window page, in all layers that have them."""
        return prod(self.window_shape) * self.dtype_of_kv.itemsize if self.windows else 0

    def num_windows(self, num_slots: int) -> int:
        """Returns the largest number of window pages that states in `num_slots` slots and running
        requests need."""
        return num_window_pages(
            self.window,
            self.page_size,
            num_states=num_slots,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one state: those of its slot, and of the window pages kept with it."""
        return self.slot_bytes + self.windows_each * self.window_bytes

    @property
    def windows_each(self) -> int:
        """Largest number of window pages that are kept with a state."""
        return window_pages(self.window, self.page_size)

    @property
    def record_bytes(self) -> int:
        """Bytes of all records together."""
        row_bytes = self.num_drafts * self.record_token_bytes
        if self.num_drafts:
            sizes = [s.num_recorded(self.num_drafts) * s.record_size for s in self.convolutions]
            sizes += [s.num_before * (s.record_size or 0) for s in self.recurrent]
            row_bytes += sum(sizes) * self.dtype.itemsize
        return self.num_record_rows * row_bytes

    @property
    def record_token_bytes(self) -> int:
        """Bytes of one draft's record, in layers with states in slots and for a head."""
        sizes = [spec.record_size or 0 for spec in self.recurrent]
        return (sum(sizes) + self.carried_size) * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, in all recurrent layers and for a head."""
        return self.carried_size * self.dtype.itemsize + sum(
            prod(spec.conv_shape) * self.dtype.itemsize
            + prod(spec.recurrent_shape) * self.state_dtype.itemsize
            for spec in self.recurrent
        )
