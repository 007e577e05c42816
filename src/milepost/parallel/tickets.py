"""Tracks the first rank's questions until all other ranks have answered."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Open:
    missing: int
    future: Future[bool] = field(default_factory=Future)
    is_well: bool = True


class Tickets:
    """Open questions to `num_ranks` ranks. They may be asked and answered from
    different threads."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, _Open] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def take(self) -> tuple[int, Future[bool]]:
        """Opens a question. The future tells whether all ranks said yes, once all have answered."""
        with self._lock:
            ticket, self._next = self._next, self._next + 1
            one = _Open(self._num_ranks)
            if self._error is None:
                self._open[ticket] = one
            else:
                one.future.set_exception(self._error)
        return ticket, one.future

    def answer(self, ticket: int, is_well: bool) -> None:
        """Records one rank's answer."""
        with self._lock:
            one = self._open.get(ticket)
            if one is None:
                return
            one.missing -= 1
            one.is_well = one.is_well and is_well
            if one.missing:
                return
            del self._open[ticket]
        one.future.set_result(one.is_well)

    def fail(self, error: BaseException) -> None:
        """Fails all open and later questions, since no rank answers any more."""
        with self._lock:
            self._error = error
            unanswered, self._open = list(self._open.values()), {}
        for one in unanswered:
            one.future.set_exception(error)
