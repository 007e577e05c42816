"""Tensor parallelism: the part of a tensor that each rank keeps, and how results are summed."""

from milepost.parallel.cut import Axes, Cut
from milepost.parallel.ranks import ALONE, Link, Ranks

__all__ = ["ALONE", "Axes", "Cut", "Link", "Ranks"]
