"""Connects the scheduler to other engines: their part of a prompt is a source from which a request
may resume, and KV and states prefilled here are lent to them.

Only the engine's thread uses it, with `settle` before each step. Each request gives its role. A
request that only prefills ends before its last token, so that another engine resumes from the state
at its end, which stays here as an ordinary checkpoint. A request that continues another engine's
prefill is matched here first, and fetches only the missing part, or nothing if a state here is
nearly as deep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milepost.cache import Cache, Match
from milepost.cache.tree import Chain
from milepost.disaggregation.finds import PendingFinds
from milepost.disaggregation.leases import Leases, Lending
from milepost.disaggregation.links import Links
from milepost.disaggregation.messages import VERSION, Asked, Find, Hello, Pulled, Read, RemoteMatch
from milepost.disaggregation.pulls import Pull
from milepost.kv_transfer_params import Remote, written
from milepost.scheduler.outside import Offer
from milepost.scheduler.plans import Load
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from milepost.disaggregation.exchange import Access

SOURCE = "remote"
"""Name of other engines wherever the source of a load is given."""

LEAST_TOKENS = 64
"""Fewest tokens that are worth fetching; fewer are computed faster, since a state is as large as
the KV of thousands of tokens."""
MAX_READERS = 2**16
"""Largest number of prompts whose readers are remembered."""


class Connector:
    """A source of the scheduler. Raises ConfigError. `close` it at the end.

    `filled` is called with a slot whose state has arrived and its number of tokens; `fence` is
    `Runner.fence` for all ranks.
    """

    name = SOURCE

    def __init__(
        self,
        scheduler: Scheduler,
        access: Access,
        *,
        filled: Callable[[int, int], None],
        fence: Callable[[], Callable[[], bool]],
        clock: Callable[[], float],
        ring: Callable[[], None],
    ) -> None:
        self._scheduler, self._note_state = scheduler, filled
        self._cache = cache = scheduler.outside.cache
        assert isinstance(cache, Cache), "comparisons lend nothing"
        self.engine_id, self.transport = access.engine_id, access.transport
        config = access.config
        exchange = config.exchange
        hello = Hello(
            version=VERSION,
            identity=cache.identity,
            engine_id=self.engine_id,
            transport=self.transport.name,
            host=config.kv_ip,
            port=config.kv_port,
            layout=access.endpoints[0].layout,
            num_ranks=len(access.endpoints),
        )
        self.lending = Lending(
            cache,
            self.transport,
            Leases(exchange.lease_s, clock),
            most=exchange.lend_share,
            fence=fence,
        )
        self.leases = self.lending.leases
        self.links = Links(
            hello,
            self.transport,
            self.leases,
            peers=exchange.peers,
            timeout_s=exchange.timeout_s,
            lease_s=exchange.lease_s,
            clock=clock,
            ring=ring,
        )
        self._asked = PendingFinds(cache, self.lending, self.links.tell, ring)
        self.place = self.links.hello.host, self.links.hello.port
        self._wanted: dict[int, tuple[Request, Remote]] = {}
        """Requests that may fetch from a lease and have not begun to."""
        self._fetching: dict[int, Load] = {}
        self._readers: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        """Maps a page to the address of the engine that continued after it."""
        self._finds: dict[int, bytes] = {}
        """Maps the number of a question to the page that led to the engine it was sent to."""
        self._found: list[RemoteMatch] = []
        """Answers that `settle` has not returned yet."""
        self._num_finds = self.num_fetched = self.num_failed = 0
        self.num_bytes = 0
        """Bytes fetched so far."""
        self.fetch_s = 0.0
        """Time that fetches took."""
        self.read_s = 0.0
        """Time of the reads alone, which is part of `fetch_s`."""
        scheduler.outside.add_source(self)
        scheduler.outside.max_loading = exchange.max_transfers

    # --- requests that go on from elsewhere -------------------------------------------------------

    def want(self, request: Request, remote: Remote) -> None:
        """Lets a request that was just added fetch from a lease."""
        self._wanted[request.number] = request, remote
        self.links.hold(remote)

    def offer(self, request: Request, match: Match) -> Offer:
        """Offers the part of a prompt under a lease, if it is worth its bytes."""
        wanted = self._wanted.get(request.number)
        position = 0 if wanted is None else wanted[1].position
        num_tokens = position - match.state_length
        if num_tokens < LEAST_TOKENS or position > request.chain.last_resume:
            return Offer(source=self.name)
        return Offer(source=self.name, position=position, tokens={self.name: num_tokens})

    def begin(self, load: Load) -> None:
        """Records that a request was admitted and continues from its lease."""
        self._fetching[load.number] = load

    def fetch(self, loads: tuple[Load, ...], is_ready: Callable[[], bool]) -> None:
        """Starts the fetches of a launched plan. `is_ready`, called from any thread, tells whether
        all earlier launches that could conflict are done.
        """
        for load in loads:
            if load.source == self.name:
                self.links.pull(self._pull(load, is_ready))

    def _pull(self, load: Load, is_ready: Callable[[], bool]) -> Pull:
        _, remote = self._wanted.pop(load.number)
        arrivals = load.arrivals
        pages = tuple(arrival.id for arrival in arrivals if arrival.what != "state")
        num_all = -(-load.position // self._cache.page_size)
        states = [arrival for arrival in arrivals if arrival.what == "state"]
        return Pull(
            number=load.number,
            remote=remote,
            key=arrivals[-1].key,
            first=num_all - len(pages),
            pages=pages,
            slot=states[0].id if states else None,
            windows=states[0].windows if states else (),
            is_ready=is_ready,
        )

    def end(self, number: int) -> None:
        """Records that nothing more is fetched for a request."""
        self._fetching.pop(number, None)

    # --- what others may read ---------------------------------------------------------------------

    def lend(self, chain: Chain) -> dict[str, Any] | None:
        """Keeps the cached part of a prompt for another engine and returns where it is, or None if
        nothing is cached.
        """
        granted = self.lending.grant(chain)
        if granted is None:
            return None
        remote = Remote(
            engine_id=self.engine_id,
            host=self.place[0],
            port=self.place[1],
            lease=granted.lease,
            position=granted.position,
        )
        return written(remote, granted.pages, granted.slot, self.links.hello.num_ranks)

    # --- the next turn ----------------------------------------------------------------------------

    def look_elsewhere(self, chain: Chain) -> int | None:
        """Asks the engine that continued a prompt's beginning, if known, for its continuation.
        Returns the question's number, under which `settle` later returns the answer.
        """
        digests = chain.full_digests()
        for depth in range(len(digests), 0, -1):
            place = self._readers.get(digests[depth - 1])
            if place is not None:
                break
        else:
            return None
        least = self._cache.match(chain).state_length + LEAST_TOKENS
        if least >= len(chain):
            return None
        self._num_finds += 1
        self._finds[self._num_finds] = digests[depth - 1]
        self.links.find(self._num_finds, place, Find.of(chain, least))
        return self._num_finds

    def refuse(self, remote: Remote) -> None:
        """Releases a match that is not wanted any more."""
        self.links.release(remote)

    # --- between steps ----------------------------------------------------------------------------

    def settle(self) -> list[RemoteMatch]:
        """Handles arrivals, answers other engines and takes back loans that are over. Returns the
        matches found elsewhere.
        """
        self._take()
        self._asked.answer()
        self.lending.take_back()
        self.leases.are_final = bool(self._scheduler.waiting) and not self._scheduler.running
        for number, (request, remote) in list(self._wanted.items()):
            if number in self._fetching:
                continue
            if request.allocation is not None or request.finish_reason is not None:
                del self._wanted[number]  # it needs nothing from the lease
                self.links.release(remote)
        found, self._found = self._found, []
        return found

    def end_loads(self) -> None:
        """Ends every load and every lease, since it is unknown how far the interrupted plan got."""
        self.links.end_pulls()
        self._take()
        for number in list(self._fetching):  # loads that had not begun
            wanted = self._wanted.pop(number, None)
            if wanted is not None:
                self.links.release(wanted[1])
            self.num_failed += 1
            self._scheduler.failed(number)
        self.lending.end()

    def _take(self) -> None:
        for outcome in self.links.take():
            match outcome:
                case Pulled():
                    self._pulled(outcome)
                case Read():
                    self._note_reader(outcome)
                case RemoteMatch():
                    page = self._finds.pop(outcome.number)
                    if outcome.remote is None:
                        self._readers.pop(page, None)
                    self._found.append(outcome)
                case Asked():
                    self._asked.add(outcome)

    def _pulled(self, pulled: Pulled) -> None:
        if pulled.problem:
            self.num_failed += 1
            self._scheduler.failed(pulled.number)
        else:
            self.num_fetched += 1
            self.num_bytes += pulled.num_bytes
            self.fetch_s += pulled.seconds
            self.read_s += pulled.read_s
            load = self._fetching[pulled.number]
            for arrival in load.arrivals:
                if arrival.what == "state":
                    self._note_state(arrival.id, load.position)
            self._scheduler.arrived(pulled.number)

    def _note_reader(self, read: Read) -> None:
        self._readers[read.page] = read.host, read.port
        self._readers.move_to_end(read.page)
        if len(self._readers) > MAX_READERS:
            self._readers.popitem(last=False)

    @property
    def counters(self) -> dict[str, float]:
        """Counters of the exchange, by name."""
        return {
            "kv_transfers": self.num_fetched,
            "kv_transfer_bytes": self.num_bytes,
            "kv_transfer_seconds": self.fetch_s,
            "kv_transfer_read_seconds": self.read_s,
            "kv_transfer_failures": self.num_failed,
            "kv_leases_granted": self.leases.num_granted,
            "kv_leases_expired": self.leases.num_expired,
            "kv_leases_refused": self._cache.loans.num_refused,
        }

    def close(self) -> None:
        self.links.close()
        self.transport.close()
        self.lending.end()
