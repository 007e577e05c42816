"""Lends what is cached to other engines. Only the engine's thread uses it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from milepost.cache import Cache
from milepost.cache.tree import Chain, checkpoint_key
from milepost.disaggregation.leases import Leases
from milepost.disaggregation.messages import Granted
from milepost.disaggregation.transport import Transport


class Lending:
    """Grants leases on at most the share `most` of the cache, and takes back their loans."""

    def __init__(
        self,
        cache: Cache,
        transport: Transport,
        leases: Leases,
        *,
        most: float,
        fence: Callable[[], Callable[[], bool]],
    ) -> None:
        self._cache, self._transport, self.leases = cache, transport, leases
        self._most, self._fence = most, fence

    def grant(self, chain: Chain, least: int = 1) -> Granted | None:
        """Lends the cached part of a prompt. Returns None if it has fewer than `least` tokens."""
        loan = self._cache.lend(chain, most=self._most)
        if loan is None:
            return None
        if loan.position < least:
            self._cache.take_back(loan)
            return None
        depth = loan.position // self._cache.page_size
        page = chain.digests(depth)[depth - 1] if depth else chain.root
        tail = chain.content(depth * self._cache.page_size, loan.position)
        key, id_ = checkpoint_key(page, tail), uuid.uuid4().hex
        self._transport.lend(id_, loan.pages, loan.slot)  # the fence must come later
        self.leases.grant(id_, loan, key, page, self._fence())
        return Granted(lease=id_, position=loan.position, key=key, pages=loan.pages, slot=loan.slot)

    def take_back(self) -> None:
        """Takes back the loans of leases that are over."""
        for lease, loan in self.leases.take_over().items():
            self._transport.end_loan(lease)
            self._cache.take_back(loan)

    def end(self) -> None:
        """Ends all leases."""
        self.leases.end()
        self.take_back()
