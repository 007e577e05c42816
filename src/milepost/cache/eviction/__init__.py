"""Eviction: scores of checkpoints, orders of what may go, and making room."""

from milepost.cache.eviction.hold_back import HoldBack
from milepost.cache.eviction.reclaim import Reclaimer
from milepost.cache.eviction.score import Expected, Score

__all__ = ["Expected", "HoldBack", "Reclaimer", "Score"]
