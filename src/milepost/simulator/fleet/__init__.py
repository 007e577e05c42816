"""Many engines in virtual time, and the routing of requests among them."""

from milepost.simulator.fleet.fleet import Fleet, FleetRun, Shape
from milepost.simulator.fleet.routing import ROUTINGS

__all__ = ["ROUTINGS", "Fleet", "FleetRun", "Shape"]
