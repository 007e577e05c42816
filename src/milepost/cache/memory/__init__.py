"""Pages and slots: ids with reference counts, in two pools of fixed sizes or in one memory."""

from milepost.cache.memory.free import FreeList
from milepost.cache.memory.pool import ZERO_SLOT, Pool
from milepost.cache.memory.storage import Split, Storage, UnifiedPool, fit, pages_in_place

__all__ = [
    "ZERO_SLOT",
    "FreeList",
    "Pool",
    "Split",
    "Storage",
    "UnifiedPool",
    "fit",
    "pages_in_place",
]
