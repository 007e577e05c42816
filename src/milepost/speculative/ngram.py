"""Drafts what followed the last tokens where they occurred before in the same request: vLLM's
prompt lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish
from milepost.speculative.occurrences import Occurrences, continuation

MAX_TEXT = 1 << 16
"""Tokens of a prompt that are looked through, the last: some 20 ms of a long one's first step."""


class NgramDrafter:
    """Looks up the last `longest` tokens, or fewer, down to `shortest`."""

    method = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._texts: dict[int, Occurrences] = {}
        """By request number."""

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._propose(wish.request, wish.most) for wish in wishes]

    def _propose(self, request: Request, most: int) -> Sequence[int]:
        text = follow(self._texts, request, self._shortest)
        tail = text.text[-self._longest :]
        places = text.find(tail, depth=self._longest, before=len(text))
        return continuation(places, most).tokens if places else ()

    def is_ready(self, request: Request) -> bool:
        """Whether its text goes on as one before, by now."""
        return bool(self._propose(request, 1))

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)


def follow(texts: dict[int, Occurrences], request: Request, width: int) -> Occurrences:
    """A request's own text, with what it has got since it was last asked for."""
    text = texts.get(request.number)
    if text is None:
        text = Occurrences(width, max(request.num_tokens - MAX_TEXT, 0))
        texts[request.number] = text
    text.extend(request.chain.tokens[text.num_skipped + len(text) :])
    return text
