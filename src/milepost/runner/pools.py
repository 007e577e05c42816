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
    """Tensors by layer index; those of a kind are views of one tensor over all layers."""

    kv: dict[int, Tensor]
    """[2, pages, page_size, num_kv_heads, head_dim]"""
    states: dict[int, RecurrentState]
    page_size: int
    all_kv: Tensor | None
    """[attention layers, 2, pages, page_size, num_kv_heads, head_dim]"""

    @property
    def device(self) -> torch.device:
        if self.all_kv is not None:
            return self.all_kv.device
        return next(iter(self.states.values())).conv.device

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the KV of a page's first tokens to another page, in every layer."""
        if self.all_kv is not None:
            self.all_kv[:, :, target, :num_tokens] = self.all_kv[:, :, source, :num_tokens]


def allocate(shape: PoolShape, *, num_pages: int, num_slots: int, device: torch.device) -> Pools:
    """Zeroed pools; `num_slots` usable slots come on top of the zero slot.

    Layers of one kind have one shape in every model that there is.
    """
    attention, recurrent = _attention(shape.specs), _recurrent(shape.specs)
    assert len(set(attention)) <= 1, "attention layers have one shape"
    assert len(set(recurrent)) <= 1, "recurrent layers have one shape"
    all_kv, conv, states = None, (), ()
    if attention:
        spec = attention[0]
        size = (2, num_pages, shape.page_size, spec.num_kv_heads, spec.head_dim)
        all_kv = torch.zeros((len(attention), *size), dtype=shape.dtype, device=device)
    if recurrent:
        spec, size = recurrent[0], (len(recurrent), num_slots + 1)
        conv = torch.zeros((*size, *spec.conv_shape), dtype=shape.dtype, device=device)
        states = torch.zeros((*size, *spec.recurrent_shape), dtype=shape.state_dtype, device=device)
    kv_views = iter(all_kv if all_kv is not None else ())
    state_views = map(_as_state, conv, states)
    kv, by_layer = {}, {}
    for index, spec in enumerate(shape.specs):
        if isinstance(spec, AttentionSpec):
            kv[index] = next(kv_views)
        else:
            by_layer[index] = next(state_views)
    return Pools(kv=kv, states=by_layer, page_size=shape.page_size, all_kv=all_kv)


def _as_state(conv: Tensor, recurrent: Tensor) -> RecurrentState:
    return RecurrentState(conv=conv, recurrent=recurrent)


def _attention(specs: Sequence[LayerSpec]) -> list[AttentionSpec]:
    return [spec for spec in specs if isinstance(spec, AttentionSpec)]


def _recurrent(specs: Sequence[LayerSpec]) -> list[RecurrentSpec]:
    return [spec for spec in specs if isinstance(spec, RecurrentSpec)]
