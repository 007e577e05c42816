"""Clients in virtual time: when each request comes, who gives up on it, and who tries again.

Arrivals are as recorded, or *closed*: a session's first request arrives as recorded, each further
one its think time after the previous answer. A client with `Patience` gives up if the first token
does not come in time, and tries again like OpenAI's and Anthropic's libraries: after a pause that
doubles, or after the time that a refusal names. One that has tried often enough ends its session.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf

from milepost.simulator.trace import Trace, TraceRequest

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LONGEST_RETRY_AFTER_S = 60.0
"""Longest time named by a refusal that clients wait for; instead of a longer one they pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The patience of clients: their wait for a first token, and their number of tries."""

    timeout_s: float = inf
    max_retries: int = 2


@dataclass(slots=True, kw_only=True)
class Goodput:
    """Counts of questions and answers; each question is a request of the trace."""

    num_asked: int = 0
    num_retries: int = 0
    num_given_up: int = 0
    """Questions whose clients tried as often as they do, without a first token."""
    num_refusals: int = 0
    """Times that a request was refused, or ended, because of its wait for a turn."""
    ttft_s: list[float] = field(default_factory=list)
    """Time from each question to its first token, in order of the tokens."""

    def num_within(self, seconds: float) -> int:
        """Returns the number of questions whose first token came within this time."""
        return sum(ttft_s <= seconds for ttft_s in self.ttft_s)


@dataclass(slots=True)
class _Try:
    """A question that has no first token yet."""

    asked_s: float
    num: int = 1


class Clients:
    """All clients of one trace."""

    def __init__(self, trace: Trace, *, closed: bool, patience: Patience | None = None) -> None:
        self.asked = Goodput()
        self._patience = patience or Patience()
        self._requests = trace.requests
        self._heap: list[tuple[float, int]] = []
        self._next: dict[int, int] = {}
        """The following request of a session, by number."""
        self._tries: dict[int, _Try] = {}
        self._timeouts: list[tuple[float, int, int]] = []
        """Time, number of the request and of the try."""
        last: dict[tuple[str, str | None], int] = {}
        for number, request in enumerate(trace.requests):
            thread = request.thread if closed else None
            if thread is not None and thread in last:
                self._next[last[thread]] = number
            else:
                heapq.heappush(self._heap, (request.arrival_s, number))
            if thread is not None:
                last[thread] = number

    @property
    def next_s(self) -> float:
        """Time at which a client next does something; infinity for never."""
        return min(self.next_arrival_s, self._timeouts[0][0] if self._timeouts else inf)

    @property
    def next_arrival_s(self) -> float:
        """Time at which the next request is sent; infinity if none is known."""
        return self._heap[0][0] if self._heap else inf

    def due(self, now_s: float) -> list[int]:
        """Returns the numbers of the requests that are sent by now."""
        numbers = []
        while self._heap and self._heap[0][0] <= now_s:
            sent_s, number = heapq.heappop(self._heap)
            numbers.append(number)
            if number not in self._tries:
                self._tries[number] = _Try(sent_s)
                self.asked.num_asked += 1
            if self._patience.timeout_s < inf:
                times_out_s = sent_s + self._patience.timeout_s
                entry = times_out_s, number, self._tries[number].num
                heapq.heappush(self._timeouts, entry)
        return numbers

    def timed_out(self, now_s: float) -> list[int]:
        """Returns the numbers of the requests that are given up by now; some come again."""
        numbers = []
        while self._timeouts and self._timeouts[0][0] <= now_s:
            _, number, num = heapq.heappop(self._timeouts)
            tried = self._tries.get(number)
            if tried is not None and tried.num == num:
                numbers.append(number)
                self._try_again(number, now_s, None)
        return numbers

    def refused(self, number: int, now_s: float, retry_after_s: float) -> None:
        """Records that a request was refused, or ended, because of its wait."""
        self.asked.num_refusals += 1
        self._try_again(number, now_s, retry_after_s)

    def _try_again(self, number: int, now_s: float, retry_after_s: float | None) -> None:
        tried = self._tries[number]
        if tried.num > self._patience.max_retries:
            del self._tries[number]
            self.asked.num_given_up += 1
            return
        pause_s = min(FIRST_PAUSE_S * 2 ** (tried.num - 1), LONGEST_PAUSE_S)
        if retry_after_s is not None and retry_after_s <= LONGEST_RETRY_AFTER_S:
            pause_s = retry_after_s
        tried.num += 1
        self.asked.num_retries += 1
        heapq.heappush(self._heap, (now_s + pause_s, number))

    def begun(self, number: int, now_s: float) -> None:
        """Records a request's first token."""
        self.asked.ttft_s.append(now_s - self._tries.pop(number).asked_s)

    def done(self, number: int, now_s: float) -> None:
        """Records that a request is over; its session continues."""
        self._tries.pop(number, None)
        following = self._next.get(number)
        if following is not None:
            think_s = _think_s(self._requests[number], self._requests[following])
            heapq.heappush(self._heap, (now_s + think_s, following))


def _think_s(before: TraceRequest, after: TraceRequest) -> float:
    """Returns the recorded think time, or the time between the arrivals if there is none."""
    return after.think_s if after.think_s is not None else after.arrival_s - before.arrival_s
