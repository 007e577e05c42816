"""Canonicalises answers: computes them again as prompts while the engine is otherwise idle.

In the bitwise mode, what decodes compute is not shared (see cache/README.md), so a chat's next turn
has to compute the answer again. An idle engine does that in the meantime, one answer at a time, the
newest first. A new request interrupts it; what has been computed by then stays cached.
"""

from __future__ import annotations

import sys

from milepost.cache import Cache, Chain
from milepost.cache.placement import floor
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.scheduler import Scheduler


class Canonical:
    """Has `scheduler` compute the answers that the cache remembers. In the default mode there are
    none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._latest: Request | None = None
        """The request that was queued last."""

    def begin(self) -> bool:
        """Queues the newest answer that is not shared yet, if there is no other work. Returns
        whether one was queued."""
        if self._scheduler.has_work:
            return False
        cache = self._scheduler.outside.cache
        while cache.tree.answers:
            chain, end = cache.tree.answers.pop()
            if self._latest is not None and chain is self._latest.chain:
                continue  # complete, even if there was no room to keep it
            if chain.pictures:
                continue  # its pixels are gone
            whole = _whole(cache, chain)
            if whole.shared_end > cache.match(whole).state_length:
                request = self._latest = Request(
                    id="canonical",
                    chain=whole,
                    max_tokens=0,
                    priority=sys.maxsize,
                    is_bitwise=True,
                )
                self._scheduler.add(request)
                assert request.reservation is not None
                request.reservation.end = end
                return True
        return False

    def give_way(self) -> None:
        """Ends the answer being computed. If it is not complete, it waits for its turn again."""
        request = self._latest
        if request is not None and self._scheduler.finish(request, FinishReason.ABORT):
            self._latest = None


def _whole(cache: Cache, chain: Chain) -> Chain:
    """Returns a prompt and its answer as one prompt. It ends one token after the last position to
    be shared, so that a match may resume at that position."""
    return cache.chain(chain.tokens[: floor(len(chain), cache.grid) + 1], chain.salt)
