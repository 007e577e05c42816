"""To which of several replicas a request is best sent: one rule, for Ray and for the simulator."""

from __future__ import annotations

LACKING = 2
"""So much a token counts that is computed for want of a page elsewhere: beside its time it takes
memory, where it pushes out what another request would hit."""


def cost(num_lacking: int, num_waiting: int) -> int:
    """What it costs to send a request where `num_lacking` of its tokens are not cached and
    `num_waiting` tokens of other prompts are still to be computed. The least is best, however many
    requests are there: what they have to compute differs by a thousand times.
    """
    return LACKING * num_lacking + num_waiting
