"""Others that read what is cached, each for a while."""

from __future__ import annotations

import random
from collections.abc import Sequence

from milepost.cache import Cache, Chain
from milepost.cache.allocation import Loan
from tests.fakes import EMPTY, FakeRunner, consume


class Readers:
    """What is lent to them stays as it is; `check` compares it."""

    def __init__(self, cache: Cache, runner: FakeRunner, rng: random.Random) -> None:
        self._cache, self._runner, self._rng = cache, runner, rng
        self._loans: dict[Loan, list[bytes]] = {}
        """With the states after each of its tokens."""
        self.num_lent = 0

    def come_and_go(self, chains: Sequence[Chain]) -> None:
        """Now and then one more reads what there is of one of these, or one is done."""
        if self._rng.random() < 0.2:
            chain = self._rng.choice(chains)
            loan = self._cache.lend(self._cache.chain(chain.tokens, chain.salt))
            if loan is not None:
                states = [EMPTY]
                for token in chain.tokens[: loan.position]:
                    states.append(consume(states[-1], token))
                self._loans[loan] = states[1:]
                self.num_lent += 1
        if self._loans and self._rng.random() < 0.2:
            self._take_back(self._rng.choice(list(self._loans)))

    def end(self) -> bool:
        """All are done; False if there was none."""
        loans = list(self._loans)
        for loan in loans:
            self._take_back(loan)
        return bool(loans)

    def check(self) -> None:
        """They are as they were lent, and so are what a copy that no plan has made yet moves."""
        targets = {move.target for move in self._cache.outbox.moves}
        size, runner = self._cache.page_size, self._runner
        for loan, states in self._loans.items():
            assert loan in self._cache.loans
            assert targets.isdisjoint(loan.pages), "what is lent is where it is said to be"
            for index, page in enumerate(loan.pages):
                wanted = states[size * index : size * (index + 1)]
                assert runner.kv[page][: len(wanted)] == wanted, f"lent page {page} is wrong"
                if runner.uses_pages and len(wanted) == size:
                    assert runner.beside[page] == wanted[-1], f"beside page {page} is wrong"
            if loan.slot is not None:
                assert runner.slots[loan.slot] == states[-1], f"lent slot {loan.slot} is wrong"

    def _take_back(self, loan: Loan) -> None:
        del self._loans[loan]
        self._cache.take_back(loan)
