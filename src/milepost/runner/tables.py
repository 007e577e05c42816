"""The page tables of running requests, on the host and on the device.

Tables are append-only, so a step brings only the pages that have come since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from milepost.runner.arrays import HostTables
from milepost.runner.staging import Staging
from milepost.scheduler.plans import SequencePlan

PAGES_AT_ONCE = 1 << 16
"""Entries that one copy brings: more than most steps have, whatever the number of slots."""
_ENTRY_BYTES = 8 + 4


@dataclass(frozen=True, slots=True)
class _NewPages:
    """Entries that the device doesn't have yet."""

    indices: Any
    pages: Any


class PageTables:
    """A row for each slot, `max_pages` long, in both places."""

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.host = HostTables(num_slots, max_pages)
        self.on_device: Tensor = torch.zeros(self.host.rows.shape, dtype=torch.int32, device=device)
        self._staging = Staging(device, _ENTRY_BYTES * PAGES_AT_ONCE)

    @property
    def num_pinned_bytes(self) -> int:
        """Of the host's memory that cannot be paged out; the same for any number of slots."""
        return self._staging.num_pinned_bytes

    def bring(self, sequences: Sequence[SequencePlan]) -> None:
        """Make both hold all pages of these sequences; waits for nothing."""
        indices, pages = self.host.update(sequences)
        for first in range(0, len(indices), PAGES_AT_ONCE):
            part = slice(first, first + PAGES_AT_ONCE)
            new = _NewPages(indices[part], pages[part])
            self._staging.send(new)
            views = self._staging.views(new)
            self.on_device.view(-1).index_copy_(0, views.indices, views.pages)
