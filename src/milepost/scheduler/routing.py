"""The cost of sending a request to a replica: one rule, for Ray and for the simulator."""

from __future__ import annotations


def cost(num_lacking: int, num_waiting: int, num_displaced: int | None = None) -> int:
    """Returns the tokens that are computed because a request is sent to a replica, or before it:
    the `num_lacking` of its own that are not cached there, the `num_waiting` of other prompts, and
    the `num_displaced` that others will ask for and that are evicted for it.

    A replica that may be full displaces as many as it lacks, which is the default. The least cost
    is best, whatever the number of requests: what they have to compute differs by a thousand times.
    """
    return num_lacking + num_waiting + (num_lacking if num_displaced is None else num_displaced)
