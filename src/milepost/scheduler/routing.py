"""The cost of sending a request to a replica: one rule, for Ray and for the simulator."""

from __future__ import annotations

LACKING = 2
"""Weight of a token that is computed because a replica lacks it: besides its time it takes memory,
and evicts what another request would hit."""


def cost(num_lacking: int, num_waiting: int) -> int:
    """Returns the cost of a request that lacks `num_lacking` tokens at a replica with `num_waiting`
    tokens of other prompts to compute.

    The least cost is best, whatever the number of requests: what they have to compute differs by a
    thousand times.
    """
    return LACKING * num_lacking + num_waiting
