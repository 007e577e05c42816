"""Eviction: what each checkpoint is worth, which one goes first, and making room."""

from milepost.cache.eviction.hold_back import LOOK_AHEAD, HoldBack
from milepost.cache.eviction.reclaim import Reclaimer
from milepost.cache.eviction.score import Score

__all__ = ["LOOK_AHEAD", "HoldBack", "Reclaimer", "Score"]
