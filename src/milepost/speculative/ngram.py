"""Drafts the tokens that followed an earlier occurrence of the last tokens in the same request,
like vLLM's prompt lookup."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from milepost.cache.tree import Chain
from milepost.pictures import overlapping
from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish
from milepost.speculative.occurrences import BREAK, PICTURED, Occurrences, continuation

MAX_TEXT = 1 << 16
"""Number of tokens at the end of a prompt that are searched. Indexing them takes about 20 ms of a
long prompt's first step."""


class NgramDrafter:
    """Looks up the last `longest` tokens, or fewer, down to `shortest`."""

    method = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._texts: dict[int, Occurrences] = {}
        """Maps a request's number to its text."""

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._propose(wish.request, wish.most) for wish in wishes]

    def _propose(self, request: Request, most: int) -> Sequence[int]:
        text = follow(self._texts, request, self._shortest)
        tail = text.text[-self._longest :]
        places = text.find(tail, depth=self._longest, before=len(text))
        return continuation(places, most).tokens if places else ()

    def is_ready(self, request: Request) -> bool:
        """Whether the text so far ends like an earlier part of it."""
        return bool(self._propose(request, 1))

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)


def follow(texts: dict[int, Occurrences], request: Request, width: int) -> Occurrences:
    """Returns a request's own text, extended by the tokens that are new since the last call."""
    text = texts.get(request.number)
    if text is None:
        text = Occurrences(width, max(request.num_tokens - MAX_TEXT, 0))
        texts[request.number] = text
    text.extend(words(request.chain, text.num_skipped + len(text)))
    return text


def words(chain: Chain, start: int) -> array[int]:
    """Returns the tokens from `start` on to be compared: those of a picture, which have one id
    whatever it shows, are replaced by a word of its own."""
    words = chain.tokens[start:]
    for each in overlapping(chain.pictures, start, len(chain)):
        first = max(each.offset, start)
        word = PICTURED + int.from_bytes(each.identity[-4:]) % (BREAK - PICTURED)
        words[first - start : each.end - start] = array("I", [word]) * (each.end - first)
    return words
