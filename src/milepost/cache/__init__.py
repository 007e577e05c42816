"""The prefix cache of a hybrid model: pure Python without tensors, clock or I/O. See README.md in
this folder."""

from milepost.cache.allocation import Allocation
from milepost.cache.cache import Cache
from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import Kind, Mode
from milepost.cache.plans import Export, PageCopy
from milepost.cache.report import CacheReport, Lost, Stats
from milepost.cache.tree import Chain, Match

__all__ = [
    "ZERO_SLOT",
    "Allocation",
    "Cache",
    "CacheReport",
    "Chain",
    "Export",
    "Kind",
    "Lost",
    "Match",
    "Mode",
    "PageCopy",
    "Stats",
]
