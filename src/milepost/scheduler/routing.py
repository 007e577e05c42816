"""To which of several replicas a request is best sent: one rule, for Ray and for the simulator."""

from __future__ import annotations

LACKING = 2
"""So much a token counts that is computed for want of a page elsewhere: beside its time it takes
memory, where it pushes out what another request would hit."""


def cost(num_lacking: int, num_waiting: int, num_requests: int) -> int:
    """What it costs to send a request where `num_lacking` of its tokens are not cached,
    `num_waiting` tokens of other prompts are still to be computed, and `num_requests` run or wait:
    tokens until the first one of its answer, as often as there are requests to share steps with.
    The least is best.
    """
    return (LACKING * num_lacking + num_waiting) * (num_requests + 1)
