"""Engines in virtual time, one or many, and the routing of requests among them."""

from milepost.simulator.fleet.engine import EngineLimits, Shape, outcome
from milepost.simulator.fleet.fleet import Fleet, FleetRun
from milepost.simulator.fleet.routing import ROUTINGS

__all__ = ["ROUTINGS", "EngineLimits", "Fleet", "FleetRun", "Shape", "outcome"]
