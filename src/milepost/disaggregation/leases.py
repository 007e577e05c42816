"""Leases: the parts of this engine that others may read, and until when; and `HeldLeases`, those of
other engines that requests here still need.

A lease is granted by the engine's thread, and released, prolonged or expired by the thread that
other engines talk to. A reader asks for its release: the bytes that it read are only the lent ones
if the answer says that the lease was still valid. The engine's thread frees the pinned pages and
slot later, never before that answer is certain.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from milepost.cache import Cache
from milepost.cache.allocation import Loan
from milepost.cache.tree import Chain, checkpoint_key
from milepost.disaggregation.messages import Beat, Granted, Release
from milepost.disaggregation.peers import Peers
from milepost.disaggregation.transport import TransferError, Transport
from milepost.kv_transfer_params import Remote

MAX_LENGTHS = 20
"""How many times its own length a lease may last in all: ten minutes by default, as long as a
request may wait. A reader that only sends heartbeats would keep it for good."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """A loan, the keys of its state and of its last full page, and whether the devices have
    finished computing it.
    """

    loan: Loan
    key: bytes
    page: bytes
    is_ready: Callable[[], bool]
    expires_at: float
    ends_at: float
    """Time after which heartbeats extend it no more."""


def granted(id_: str, key: bytes, loan: Loan) -> Granted:
    """Returns the message about a lease for its reader."""
    return Granted(
        lease=id_,
        position=loan.position,
        key=key,
        pages=loan.pages,
        slot=loan.slot,
        windows=loan.windows,
    )


class Leases:
    """Leases, valid for `length_s` from the grant and from each heartbeat, unless they
    `are_final`.
    """

    def __init__(self, length_s: float, clock: Callable[[], float]) -> None:
        self._length_s = length_s
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._over: dict[str, Loan] = {}
        self.are_final = False
        """Whether heartbeats extend no lease, because nothing can run here until some lease is
        over. Otherwise two engines could block each other, each with loans to requests that wait on
        the other.
        """
        self.num_granted = 0
        self.num_expired = 0

    def grant(
        self, id_: str, loan: Loan, key: bytes, page: bytes, is_ready: Callable[[], bool]
    ) -> None:
        with self._lock:
            now = self._clock()
            self._leases[id_] = Lease(
                loan=loan,
                key=key,
                page=page,
                is_ready=is_ready,
                expires_at=now + self._length_s,
                ends_at=now + MAX_LENGTHS * self._length_s,
            )
            self.num_granted += 1

    def find(self, id_: str) -> Lease | None:
        """Returns a valid lease and extends it."""
        with self._lock:
            return self._prolonged(id_)

    def prolong(self, ids: list[str]) -> None:
        """Extends leases after a heartbeat; a lease that is over stays over."""
        with self._lock:
            for id_ in ids:
                self._prolonged(id_)

    def release(self, id_: str) -> Lease | None:
        """Ends a lease. Returns it if it was valid until now."""
        with self._lock:
            lease = self._prolonged(id_)
            if lease is not None:
                self._over[id_] = self._leases.pop(id_).loan
            return lease

    @property
    def next_end(self) -> float | None:
        """Time at which the next lease ends without a heartbeat."""
        with self._lock:
            return min((lease.expires_at for lease in self._leases.values()), default=None)

    def take_over(self) -> dict[str, Loan]:
        """Returns the loans of leases that are over, by lease, each once. The caller takes them
        back.
        """
        with self._lock:
            now = self._clock()
            for id_ in [id_ for id_, lease in self._leases.items() if lease.expires_at <= now]:
                self._over[id_] = self._leases.pop(id_).loan
                self.num_expired += 1
            over, self._over = self._over, {}
            return over

    def end(self) -> None:
        """Ends all leases."""
        with self._lock:
            self._over |= {id_: lease.loan for id_, lease in self._leases.items()}
            self._leases.clear()

    def __len__(self) -> int:
        return len(self._leases)

    def _prolonged(self, id_: str) -> Lease | None:
        lease, now = self._leases.get(id_), self._clock()
        if lease is None or lease.expires_at <= now:
            return None
        if not self.are_final:
            lease.expires_at = max(lease.expires_at, min(now + self._length_s, lease.ends_at))
        return lease


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
        # The fence must come later.
        self._transport.lend(id_, loan.pages, loan.slot, loan.windows)
        self.leases.grant(id_, loan, key, page, self._fence())
        return granted(id_, key, loan)

    def take_back(self) -> None:
        """Takes back the loans of leases that are over."""
        for lease, loan in self.leases.take_over().items():
            self._transport.end_loan(lease)
            self._cache.take_back(loan)

    def end(self) -> None:
        """Ends all leases."""
        self.leases.end()
        self.take_back()


BEATS = 6
"""Heartbeats per length of a lease."""


class HeldLeases:
    """Keeps leases that are valid for `lease_s` from each heartbeat, until a release ends them.
    Used by one thread."""

    def __init__(self, peers: Peers, lease_s: float, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._beat_s = lease_s / BEATS
        self._clock = clock
        self._held: dict[Remote, None] = {}
        self._beat_at = 0.0

    @property
    def next_beat(self) -> float | None:
        return self._beat_at if self._held else None

    def hold(self, remote: Remote) -> None:
        """Starts to keep a lease."""
        self._held[remote] = None

    def let_go(self, remote: Remote) -> None:
        """Stops the heartbeats for a lease."""
        self._held.pop(remote, None)

    def release(self, remote: Remote) -> None:
        """Ends a lease and tells the other engine. An engine that was asked about it before and is
        gone is not asked again.
        """
        was_held = remote in self._held
        self.let_go(remote)
        with suppress(TransferError):
            peer = (self._peers.find if was_held else self._peers.at)(*remote.place)
            if peer is not None:
                peer.ask(Release(remote.lease), lambda _: None)

    def beat(self) -> None:
        """Sends heartbeats if they are due."""
        now = self._clock()
        if not self._held or now < self._beat_at:
            return
        self._beat_at = now + self._beat_s
        by_place: dict[tuple[str, int], list[str]] = {}
        for remote in self._held:
            by_place.setdefault(remote.place, []).append(remote.lease)
        for place, leases in by_place.items():
            peer = self._peers.find(*place)
            if peer is not None:
                peer.say(Beat(leases))
