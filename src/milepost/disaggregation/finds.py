"""Answers other engines' questions about tokens between steps, a few at a time, so that steps are
not delayed however many there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from milepost.cache import Cache
from milepost.cache.tree import TOKEN_BYTES
from milepost.disaggregation.leases import Lending
from milepost.disaggregation.messages import Asked, Find, Gone, Granted

TOKENS_AT_ONCE = 2**17
"""Tokens looked up between two steps, which takes some five milliseconds; at least one question is
answered."""
MOST_WAITING_TOKENS = 2**24
"""Tokens of the questions that wait, at most: 64 MiB. A question beyond them is answered with no,
and whoever asked computes its prompt instead."""


class PendingFinds:
    """Questions that wait for an answer, which goes to `tell`. `ring` has the next turn come."""

    def __init__(
        self,
        cache: Cache,
        lending: Lending,
        tell: Callable[[Asked, Granted | Gone], None],
        ring: Callable[[], None],
    ) -> None:
        self._cache, self._lending = cache, lending
        self._tell, self._ring = tell, ring
        self._waiting: deque[Asked] = deque()
        self._num_waiting_tokens = 0

    def add(self, asked: Asked) -> None:
        """Lets a question wait, or refuses it at once if too many do."""
        num_tokens = _num_tokens(asked)
        if self._num_waiting_tokens + num_tokens > MOST_WAITING_TOKENS:
            self._tell(asked, Gone())
            return
        self._num_waiting_tokens += num_tokens
        self._waiting.append(asked)

    def answer(self) -> None:
        """Answers some questions."""
        left = TOKENS_AT_ONCE
        while self._waiting and left > 0:
            asked = self._waiting.popleft()
            left -= _num_tokens(asked)
            self._num_waiting_tokens -= _num_tokens(asked)
            self._tell(asked, self._found(asked.find) or Gone())
        if self._waiting:
            self._ring()

    def _found(self, find: Find) -> Granted | None:
        tokens = memoryview(find.tokens).cast("I")
        if len(tokens) > self._cache.pages.capacity * self._cache.page_size:
            return None  # no prompt here is that long
        chain = self._cache.chain(tokens, find.salt, find.pictures)
        return self._lending.grant(chain, find.least)


def _num_tokens(asked: Asked) -> int:
    """Returns the length of a question with its salt, in tokens; at least one."""
    num_bytes = len(asked.find.tokens) + len(asked.find.salt)
    return max(1, num_bytes // TOKEN_BYTES)
