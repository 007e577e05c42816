"""The memory of pages and slots: KV and states of every layer as tensors.

KV is stored page after page, each with all attention layers. States that are stored with pages have
a tensor per layer: a row of zeros, then a row for each page. States in slots have a tensor per
layer too, or share one memory with the pages (see `shared`).

Legend: pages and slots as in the cache; slot 0 is all zeros and is never written.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import prod

import numpy as np
import torch
from torch import Tensor

from milepost.cache.plans import PageMove
from milepost.kernels.attention import rows_per_page
from milepost.kernels.mtp import Carried
from milepost.kernels.platform.tensors import FP8
from milepost.layers.context import AttentionSpec, RecurrentState, ShortConvSpec
from milepost.runner.pool_shape import PoolShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Tensors by layer index; those of a kind are views of one tensor over all layers."""

    kv: dict[int, Tensor]
    """[pages, rows_each, page_size, num_kv_heads, head_dim], contiguous except from page to
    page."""
    states: dict[int, RecurrentState]
    conv_states: dict[int, Tensor]
    """[1 + pages, channels, kernel - 1]: zeros, then the state stored with each page."""
    page_size: int
    all_kv: Tensor | None
    """[pages, attention layers, rows_each, page_size, num_kv_heads, head_dim], contiguous
    likewise."""
    carried: Carried | None
    """States that slots carry for an MTP head."""
    all_conv: Tensor | None
    """[short convolutions, 1 + pages, channels, kernel - 1]"""
    all_windows: Tensor | None = None
    """[window pages, layers with a sliding window, ...], like `all_kv`."""
    num_record_rows: int = 0
    """Number of requests whose drafts are recorded at a time."""
    conv_records: dict[int, Tensor] = field(default_factory=dict)
    """Records of drafts for states stored with pages: [rows, num_recorded, channels]."""
    all_states: tuple[Tensor, Tensor] | None = None
    """Convolution inputs and recurrent states, [recurrent layers, slots, ...]."""

    @property
    def page_parts(self) -> list[Tensor]:
        """Everything that makes up a page: tensors [pages, ...]."""
        parts = [self.all_kv] if self.all_kv is not None else []
        if self.all_conv is not None:
            parts.append(self.all_conv[:, 1:].transpose(0, 1))
        return parts

    @property
    def slot_parts(self) -> list[Tensor]:
        """Everything in a slot that a request needs to continue from it: tensors [slots, ...]."""
        parts = [part.transpose(0, 1) for part in self.all_states or () if part.numel()]
        if self.carried is not None:
            parts.append(self.carried.states)
        return parts

    @property
    def device(self) -> torch.device:
        for pool in (self.all_kv, self.all_windows, self.all_conv):
            if pool is not None:
                return pool.device
        return next(iter(self.states.values())).conv.device

    @property
    def page_rows(self) -> int:
        """Number of KV rows from one page to the next (see `kernels.attention.pages`)."""
        return rows_per_page(self.all_kv[:, 0]) if self.all_kv is not None else 0

    @property
    def window_page_rows(self) -> int:
        """Number of KV rows from one window page to the next."""
        return rows_per_page(self.all_windows[:, 0]) if self.all_windows is not None else 0

    @property
    def has_float8_kv(self) -> bool:
        pages = self.all_kv if self.all_kv is not None else self.all_windows
        return pages is not None and pages.dtype == FP8

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Copies whole pages in every layer, with the states stored with them. Moves run in order:
        a page may be the target of one move and the source of a later one."""
        for move in moves:
            if self.all_kv is not None:
                self.all_kv[move.target].copy_(self.all_kv[move.source])
            if self.all_conv is not None:
                self.all_conv[:, move.target + 1] = self.all_conv[:, move.source + 1]

    def release(self) -> None:
        """Returns the pools' memory to the system; afterwards it reads as zeros. Only CPU memory is
        returned. GPU memory stays, because captured graphs hold its addresses."""
        if self.device.type != "cpu":
            return
        for storage in self.storages():
            drop(storage.data_ptr(), storage.nbytes())

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the memory that holds the tensors, each piece once."""
        shared = [self.all_kv, self.all_windows, self.all_conv]
        if self.carried is not None:
            shared += [self.carried.states, self.carried.records]
        tensors = [pool for pool in shared if pool is not None]
        for state in self.states.values():
            tensors += [state.conv, state.recurrent]
            if state.records is not None:
                tensors.append(state.records)
        tensors += self.conv_records.values()
        by_address = {
            storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, tensors)
        }
        return list(by_address.values())

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the KV of a page's first tokens to another page, in every layer. The state stored
        with the page belongs to another position and is not copied."""
        if self.all_kv is not None:
            self.all_kv[target, :, :, :num_tokens] = self.all_kv[source, :, :, :num_tokens]

    def copy_window(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the KV of the first tokens of a window page to another one."""
        assert self.all_windows is not None, "only windows have such pages"
        pages = self.all_windows
        pages[target, :, :, :num_tokens] = pages[source, :, :, :num_tokens]


def allocate(
    shape: PoolShape, *, num_pages: int, num_slots: int, device: torch.device, num_windows: int = 0
) -> Pools:
    """Allocates zeroed pools of fixed sizes; `num_slots` does not count the zero slot, and
    `num_windows` counts the pages of layers with a sliding window."""

    def allocate_zeros(dtype: torch.dtype, *size: int) -> Tensor:
        return zeros(prod(size) * dtype.itemsize, device).view(dtype).view(size)

    kv, conv, recurrent, beside, carried, windows = (None,) * 6
    if shape.attention:
        kv = allocate_zeros(shape.dtype_of_kv, num_pages, *shape.page_shape)
    if shape.windows:
        windows = allocate_zeros(shape.dtype_of_kv, num_windows, *shape.window_shape)
    if shape.convolutions:
        size = (len(shape.convolutions), num_pages + 1)
        beside = allocate_zeros(shape.dtype, *size, *shape.convolutions[0].conv_shape)
    if shape.carried_size:
        carried = allocate_zeros(shape.dtype, num_slots + 1, shape.carried_size)
    layers = shape.recurrent
    if layers:
        # The slots of a layer are adjacent: on a CPU neighbours are updated in place.
        spec, size = layers[0], (len(layers), num_slots + 1)
        conv = allocate_zeros(shape.dtype, *size, *spec.conv_shape)
        recurrent = allocate_zeros(shape.state_dtype, *size, *spec.recurrent_shape)
    return by_layer(shape, kv, conv, recurrent, beside, carried, windows)


def by_layer(
    shape: PoolShape,
    kv: Tensor | None,
    conv: Tensor | None,
    recurrent: Tensor | None,
    beside: Tensor | None = None,
    carried: Tensor | None = None,
    windows: Tensor | None = None,
) -> Pools:
    """Builds pools from tensors over all layers: `kv` [pages, attention layers, ...], `conv` and
    `recurrent` [recurrent layers, slots, ...], `beside` [short convolutions, 1 + pages, ...],
    `windows` like `kv`, each None if there is no such layer; and `carried` [slots,
    carried_size]."""
    kv_views = iter(kv.unbind(1) if kv is not None else ())
    window_views = iter(windows.unbind(1) if windows is not None else ())
    state_views: Iterator[RecurrentState] = iter(())
    if conv is not None and recurrent is not None:
        state_views = map(_as_state, conv, recurrent, _records(shape, conv.device))
    beside_views = iter(beside if beside is not None else ())
    kv_by_layer: dict[int, Tensor] = {}
    states: dict[int, RecurrentState] = {}
    conv_states: dict[int, Tensor] = {}
    for index, spec in enumerate(shape.specs):
        if isinstance(spec, AttentionSpec):
            kv_by_layer[index] = next(kv_views if spec.window is None else window_views)
        elif isinstance(spec, ShortConvSpec):
            conv_states[index] = next(beside_views)
        else:
            states[index] = next(state_views)
    return Pools(
        kv=kv_by_layer,
        states=states,
        conv_states=conv_states,
        conv_records=_conv_records(shape, beside),
        page_size=shape.page_size,
        all_kv=kv,
        all_conv=beside,
        all_windows=windows,
        carried=None if carried is None else _carried(shape, carried),
        num_record_rows=shape.num_record_rows,
        all_states=None if conv is None or recurrent is None else (conv, recurrent),
    )


def _as_state(conv: Tensor, recurrent: Tensor, records: Tensor | None) -> RecurrentState:
    return RecurrentState(conv=conv, recurrent=recurrent, records=records)


def _records(shape: PoolShape, device: torch.device) -> Iterator[Tensor | None]:
    """Returns records [rows, drafts, record_size] for each recurrent layer, or None each if nothing
    is drafted."""
    layers = shape.recurrent
    size = layers[0].record_size
    if not shape.num_record_rows or size is None:
        return repeat(None, len(layers))
    num_recorded = layers[0].num_before + shape.num_drafts
    return iter(_zeroed_records(shape, device, len(layers), size, num_recorded))


def _conv_records(shape: PoolShape, beside: Tensor | None) -> dict[int, Tensor]:
    """Returns records of short convolutions by layer; empty if nothing is drafted."""
    places = [i for i, spec in enumerate(shape.specs) if isinstance(spec, ShortConvSpec)]
    if beside is None or not shape.num_record_rows:
        return {}
    spec = shape.convolutions[0]
    records = _zeroed_records(
        shape, beside.device, len(places), spec.record_size, spec.num_recorded(shape.num_drafts)
    )
    return dict(zip(places, records, strict=True))


def _carried(shape: PoolShape, states: Tensor) -> Carried:
    if not shape.num_record_rows:
        return Carried(states=states)
    (records,) = _zeroed_records(shape, states.device, 1, shape.carried_size, shape.num_drafts)
    return Carried(states=states, records=records)


def _zeroed_records(
    shape: PoolShape, device: torch.device, num: int, size: int, num_tokens: int
) -> Tensor:
    """Allocates zeroed records [num, rows, num_tokens, size]."""
    whole = num, shape.num_record_rows, num_tokens, size
    return zeros(prod(whole) * shape.dtype.itemsize, device).view(shape.dtype).view(whole)


# --- memory that reads as zeros -------------------------------------------------------------------

_ALIGNMENT = 64
"""Alignment in bytes of torch's tensors on a CPU."""


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Returns zeros [num_bytes] uint8; on a CPU they take no room until they are written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # torch.zeros would write all of them at once.
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes])


def drop(address: int, num_bytes: int) -> None:
    """Zeroes a range of memory by returning its whole pages to the system."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, start - address)
    ctypes.memset(end, 0, address + num_bytes - end)
    dropped = hasattr(mmap, "MADV_DONTNEED") and not ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED
    )
    if not dropped:
        ctypes.memset(start, 0, end - start)
