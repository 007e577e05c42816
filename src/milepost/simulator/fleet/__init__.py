"""Many engines in virtual time, and who is sent where."""

from milepost.simulator.fleet.fleet import Fleet, FleetRun, Shape
from milepost.simulator.fleet.routing import ROUTINGS

__all__ = ["ROUTINGS", "Fleet", "FleetRun", "Shape"]
