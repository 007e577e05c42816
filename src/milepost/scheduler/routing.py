"""The cost of sending a request to a replica: one rule, for Ray and for the simulator."""

from __future__ import annotations

LACKING = 2
"""Weight of a token that a replica must compute. Besides its time it takes memory, and evicts what
another request would hit."""


def cost(num_lacking: int, num_waiting: int) -> int:
    """Returns the cost of sending a request to a replica, where `num_lacking` of its tokens are not
    cached and `num_waiting` tokens of other prompts wait. The lowest cost is best. The number of
    requests does not count, since their work differs by a factor of a thousand."""
    return LACKING * num_lacking + num_waiting
