"""One model on several devices: what each rank keeps of a tensor, and how results are summed."""

from milepost.parallel.cut import Axes, Cut
from milepost.parallel.ranks import ALONE, Link, Ranks

__all__ = ["ALONE", "Axes", "Cut", "Link", "Ranks"]
