"""The memory that pages and slots stand for: KV and states of every layer as tensors.

Legend: pages and slots as in the cache; slot 0 is all zeros and nothing writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from milepost.layers.context import AttentionSpec, LayerSpec, RecurrentSpec, RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What one page and one slot hold, over all layers."""

    specs: tuple[LayerSpec, ...]
    page_size: int
    dtype: torch.dtype
    state_dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all attention layers."""
        per_token = sum(2 * s.num_kv_heads * s.head_dim for s in _attention(self.specs))
        return per_token * self.page_size * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all recurrent layers."""
        return sum(
            prod(spec.conv_shape) * self.dtype.itemsize
            + prod(spec.recurrent_shape) * self.state_dtype.itemsize
            for spec in _recurrent(self.specs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Tensors by layer index."""

    kv: dict[int, Tensor]
    """[2, pages, page_size, num_kv_heads, head_dim]"""
    states: dict[int, RecurrentState]
    page_size: int

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the KV of a page's first tokens to another page, in every layer."""
        for kv in self.kv.values():
            kv[:, target, :num_tokens] = kv[:, source, :num_tokens]


def allocate(shape: PoolShape, *, num_pages: int, num_slots: int, device: torch.device) -> Pools:
    """Zeroed pools; `num_slots` usable slots come on top of the zero slot."""
    kv, states = {}, {}
    for index, spec in enumerate(shape.specs):
        if isinstance(spec, AttentionSpec):
            size = (2, num_pages, shape.page_size, spec.num_kv_heads, spec.head_dim)
            kv[index] = torch.zeros(size, dtype=shape.dtype, device=device)
            continue
        slots = num_slots + 1
        states[index] = RecurrentState(
            conv=torch.zeros((slots, *spec.conv_shape), dtype=shape.dtype, device=device),
            recurrent=torch.zeros(
                (slots, *spec.recurrent_shape), dtype=shape.state_dtype, device=device
            ),
        )
    return Pools(kv=kv, states=states, page_size=shape.page_size)


def _attention(specs: Sequence[LayerSpec]) -> list[AttentionSpec]:
    return [spec for spec in specs if isinstance(spec, AttentionSpec)]


def _recurrent(specs: Sequence[LayerSpec]) -> list[RecurrentSpec]:
    return [spec for spec in specs if isinstance(spec, RecurrentSpec)]
