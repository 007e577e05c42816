"""A source that has everything, and brings it when it is told to."""

from __future__ import annotations

import random

from milepost.cache.tree import Match
from milepost.scheduler.outside import Offer
from milepost.scheduler.plans import Load, StepPlan
from milepost.scheduler.request import Request
from tests.fakes import EMPTY, FakeRunner, state_after

SPOILT = b"half loaded"


class OracleSource:
    """Knows the KV and the state of any tokens. Offers any position, or at times nothing."""

    name = "oracle"

    def __init__(self, runner: FakeRunner, rng: random.Random, share: float = 0.6) -> None:
        self.runner = runner
        self.rng = rng
        self.share = share
        self.begun: dict[int, Load] = {}
        """Named by a plan, which nobody has run yet."""
        self.under_way: dict[int, Load] = {}

    def offer(self, request: Request, match: Match) -> Offer:
        if self.rng.random() >= self.share:
            return Offer(source=self.name)
        position = self.rng.randint(0, request.chain.last_resume)
        if self.runner.bitwise:
            position -= position % self.runner.bitwise
        if self.runner.uses_pages:
            position -= position % self.runner.page_size
        if position <= match.state_length:
            return Offer(source=self.name)
        tokens = {self.name: position - match.state_length}
        return Offer(source=self.name, position=position, tokens=tokens)

    def begin(self, load: Load) -> None:
        self.begun[load.number] = load

    def end(self, number: int) -> None:
        assert number not in self.begun, "a load is over that nobody knows of"
        assert number not in self.under_way, "a load is over that still writes"

    def launch(self, plan: StepPlan) -> None:
        """Begin to write: until it is over, what is filled holds anything."""
        for load in plan.loads:
            assert self.begun.pop(load.number) == load
            self.under_way[load.number] = load
            self._write(load, is_whole=False)

    def bring(self, number: int) -> None:
        """All of it is there."""
        self._write(self.under_way.pop(number), is_whole=True)
        self.runner.scheduler.arrived(number)

    def lose(self, number: int) -> None:
        """It does not come."""
        if number in self.begun:
            del self.begun[number]
        else:
            del self.under_way[number]
        self.runner.scheduler.failed(number)

    def _write(self, load: Load, *, is_whole: bool) -> None:
        request = self.runner.scheduler.request(load.number)
        history, size = self.runner.history(request), self.runner.page_size
        digests, tokens = request.chain.full_digests(), request.chain.tokens
        for arrival in load.arrivals:
            if arrival.what == "state":
                state = state_after(tokens[: load.position]) if is_whole else SPOILT
                self.runner.put_state(arrival.id, state, load.position if is_whole else -1)
                last = -(-load.position // size)
                for index, page in enumerate(arrival.windows, last - len(arrival.windows)):
                    found = history[index * size + 1 : min((index + 1) * size, load.position) + 1]
                    self.runner.put_window(page, found if is_whole else [SPOILT] * size)
                continue
            index = load.position // size
            if arrival.what == "page":
                index = digests.index(arrival.key)
            end = min((index + 1) * size, load.position)
            states = history[index * size + 1 : end + 1]
            states += [SPOILT] * (size - len(states))
            self.runner.put_page(arrival.id, states if is_whole else [SPOILT] * size)
            self.runner.beside[arrival.id] = history[end] if is_whole else EMPTY
