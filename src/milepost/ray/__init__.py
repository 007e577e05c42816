"""Replicas of an engine on Ray Serve: `serve run milepost.ray:app`.

A front takes HTTP and asks one replica for each request. Each replica is a whole server in a
process of its own, with its engine beside it. A request goes to the replica where it costs least
(`scheduler.routing`): once a second, replicas report the digests of the pages that a checkpoint
makes usable, and any replica can compute the digests of a request. Ray adds and removes replicas
depending on how many requests run and wait at each. The modules:

    router, replica     where a request goes, and what answers it
    application         the front, and the whole
"""

from milepost.ray.application import app, routed
from milepost.ray.router import CostRouter

__all__ = ["CostRouter", "app", "routed"]
