"""Drafts the tokens that followed an earlier occurrence of the text's longest possible suffix, in
the request itself or in an earlier answer under the same prefix.

After Oliaro et al., SuffixDecoding (arXiv 2411.04975): a longer match means more drafts, and a
token is as likely as it was to follow there before. Their tree keeps counts for every run up to its
depth. Here the latest places of a run are looked up and compared, at the cost of one table entry
per token instead of `depth` nodes.

Earlier answers are kept by prefix: the first page of the prompt with its salt. So one tenant's
answers never serve as drafts for another, where their timing could be observed, and agents with one
system prompt share theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish
from milepost.speculative.ngram import follow, words
from milepost.speculative.occurrences import BREAK, Continuation, Occurrences, continuation

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
