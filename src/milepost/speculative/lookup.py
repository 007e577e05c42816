"""Drafts the tokens that followed an earlier occurrence of the same text.

`NgramDrafter` looks up the last tokens in the same request, like vLLM's prompt lookup.
`SuffixDrafter` looks up the text's longest possible suffix, in the request itself or in an earlier
answer under the same prefix. It follows Oliaro et al., SuffixDecoding (arXiv 2411.04975): a longer
match means more drafts, and a token is as likely as it was to follow there before. Their tree keeps
counts for every run up to its depth. Here the latest places of a run are looked up and compared, at
the cost of one table entry per token instead of `depth` nodes.

Earlier answers are kept by prefix: the first page of the prompt with its salt. So one tenant's
answers never serve as drafts for another, where their timing could be observed, and agents with one
system prompt share theirs.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from milepost.cache.tree import Chain
from milepost.pictures import overlapping
from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish
from milepost.speculative.occurrences import (
    BREAK,
    PICTURED,
    Continuation,
    Occurrences,
    continuation,
)

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


WIDTH = 3
"""Shortest match, in tokens."""
MAX_EARLIER = 1 << 16
"""Largest number of tokens of earlier answers kept under one prefix. Beyond it the older half is
dropped."""


class SuffixDrafter:
    """Compares up to `depth` tokens and drafts `factor` tokens per matched token. Keeps
    `max_answers` earlier answers, under the most recently used prefixes."""

    method = "suffix"

    def __init__(
        self,
        *,
        depth: int = 24,
        factor: float = 1.0,
        min_prob: float = 0.1,
        max_answers: int = 10000,
    ) -> None:
        self._depth = depth
        self._factor = factor
        self._min_prob = min_prob
        self._max_answers = max_answers
        self._width = min(WIDTH, depth)
        self._own: dict[int, Occurrences] = {}
        """Maps a request's number to its text."""
        self._earlier: OrderedDict[bytes, Occurrences] = OrderedDict()
        """Maps a prefix to its earlier answers, the most recently used last."""
        self._num_answers: dict[bytes, int] = {}

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._propose(wish.request, wish.most) for wish in wishes]

    def _propose(self, request: Request, most: int) -> Sequence[int]:
        history = follow(self._own, request, self._width)
        earlier = self._earlier.get(_prefix(request))
        tail = history.text[-self._depth :]
        best = Continuation([], 0.0)
        for text in (history, earlier):
            if text is None:
                continue
            places = text.find(
                tail, depth=self._depth, before=len(history) if text is history else None
            )
            if places is None:
                continue
            continued = continuation(
                places, min(most, int(self._factor * places.length)), self._min_prob
            )
            if continued.score > best.score:
                best = continued
        return best.tokens

    def is_ready(self, request: Request) -> bool:
        """Whether the text so far ends like an earlier text."""
        return bool(self._propose(request, 1))

    def forget(self, request: Request) -> None:
        """Keeps the finished answer, with the prompt tokens just before it."""
        self._own.pop(request.number, None)
        answer = words(request.chain, max(request.num_prompt_tokens - self._depth, 0))
        if not self._max_answers or request.num_output_tokens < self._width:
            return
        prefix = _prefix(request)
        text = self._earlier.setdefault(prefix, Occurrences(self._width))
        if len(text) + len(answer) > MAX_EARLIER:
            text = self._earlier[prefix] = _younger_half(text)
        text.extend(answer[-MAX_EARLIER // 2 :])
        text.extend((BREAK,))
        self._earlier.move_to_end(prefix)
        self._num_answers[prefix] = self._num_answers.get(prefix, 0) + 1
        while sum(self._num_answers.values()) > self._max_answers and len(self._earlier) > 1:
            oldest, _ = self._earlier.popitem(last=False)
            del self._num_answers[oldest]


def _prefix(request: Request) -> bytes:
    """Returns the key for sharing answers: the prompt's first page, or the salt if it is shorter
    than a page."""
    chain = request.chain
    has_page = request.num_prompt_tokens >= chain.page_size
    return chain.digests(1)[0] if has_page else chain.root


def _younger_half(text: Occurrences) -> Occurrences:
    younger = Occurrences(text.width)
    younger.extend(text.text[len(text) // 2 :])
    return younger
