"""Tensor parallelism: the part of a tensor that each rank keeps, and how results are summed."""

from milepost.parallel.ranks import ALONE, Axes, Cut, Link, Ranks

__all__ = ["ALONE", "Axes", "Cut", "Link", "Ranks"]
