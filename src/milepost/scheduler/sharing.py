"""Which pages are being computed right now, so that a request with the same prefix can wait for
them.

Waiting costs a step and saves the tokens that would be computed twice. The prefill that is under
way is asked to keep its state where the paths part, so the request that waited resumes there.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.cache.placement import floor
from milepost.cache.plans import Lease, Match
from milepost.scheduler.request import Request

MIN_SAVED_TOKENS = 128
"""Fewer are computed twice rather than waited for: a step of its own costs about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The holder of `lease` is about to compute the tokens up to `position`, which others need."""

    lease: Lease
    position: int


class InFlight:
    """Digests of prompt pages that running prefills have yet to commit, with the first that
    computes each.
    """

    __slots__ = ("_claims", "_owners")

    def __init__(self) -> None:
        self._owners: dict[bytes, Request] = {}
        self._claims: dict[Request, int] = {}

    def claim(self, request: Request) -> None:
        """Note that an admitted request computes the pages behind its cached path."""
        assert request.lease is not None
        first = len(request.lease.path)
        for digest in request.chain.full_digests()[first:]:
            self._owners.setdefault(digest, request)
        self._claims[request] = first

    def settle(self, request: Request) -> None:
        """Note that pages were committed; the last one ends the claim."""
        first = self._claims.get(request)
        if first is None or request.lease is None:
            return
        num_pages = request.num_prompt_tokens // request.chain.page_size
        done = min(len(request.lease.path), num_pages)
        self._disown(request, first, done)
        self._claims[request] = done
        if done >= num_pages:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Forget what a request claimed: it is done, preempted or gone."""
        first = self._claims.pop(request, None)
        if first is not None:
            self._disown(request, first, len(request.chain) // request.chain.page_size)

    def find(self, request: Request, match: Match) -> Shared | None:
        """The prefix that is worth waiting for, if there is one."""
        if not self._owners:
            return None
        digests = request.chain.full_digests()
        depth = len(match.path.nodes)
        while depth < len(digests) and digests[depth] in self._owners:
            depth += 1
        position = floor(min(depth * request.chain.page_size, len(request.chain) - 1))
        if position - match.state_length < MIN_SAVED_TOKENS or position <= match.kv_length:
            return None
        lease = self._owners[digests[(position - 1) // request.chain.page_size]].lease
        if lease is None or lease.position >= position:
            return None
        return Shared(lease=lease, position=position)

    def _disown(self, request: Request, first: int, end: int) -> None:
        digests = request.chain.digests(end)
        for digest in digests[first:end]:
            if self._owners.get(digest) is request:
                del self._owners[digest]
