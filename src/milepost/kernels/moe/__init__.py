"""Routed experts: `route` chooses them for each token, `apply` runs and mixes them.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition.
"""

from milepost.kernels.moe.reference import apply, route

__all__ = ["apply", "route"]
