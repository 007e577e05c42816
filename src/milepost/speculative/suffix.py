"""Drafts what followed the longest suffix of the text that occurred before: in the request itself,
or in an earlier answer under the same prefix.

After Oliaro et al., SuffixDecoding (arXiv 2411.04975): the longer the match, the more is drafted,
and a token is as likely as it followed there before. Their tree keeps counts for every run up to
its depth; here the latest places of a run are looked up and compared, which costs one table entry
per token instead of `depth` nodes.

Earlier answers are kept by prefix: the first page of the prompt with its salt. So no tenant's
answers are drafted, and timed, for another, and agents with one system prompt share theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from milepost.scheduler.request import Request
from milepost.speculative.drafter import DraftWish
from milepost.speculative.ngram import follow
from milepost.speculative.occurrences import BREAK, Continuation, Occurrences, continuation

WIDTH = 3
"""Fewest tokens that count as found."""
MAX_EARLIER = 1 << 16
"""Tokens of earlier answers under one prefix: then the older half is dropped."""


class SuffixDrafter:
    """Compares up to `depth` tokens and drafts `factor` for each that was found; keeps
    `max_answers` earlier answers, under the prefixes that were used last.
    """

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
        """By request number."""
        self._earlier: OrderedDict[bytes, Occurrences] = OrderedDict()
        """By prefix, the one used last at the end."""
        self._num_answers: dict[bytes, int] = {}

    def propose(self, wishes: Sequence[DraftWish]) -> list[Sequence[int]]:
        return [self._propose(wish.request, wish.most) for wish in wishes]

    def _propose(self, request: Request, most: int) -> Sequence[int]:
        own = follow(self._own, request, self._width)
        earlier = self._earlier.get(_prefix(request))
        tail = own.text[-self._depth :]
        best = Continuation([], 0.0)
        for text in (own, earlier):
            if text is None:
                continue
            places = text.find(tail, depth=self._depth, before=len(own) if text is own else None)
            if places is None:
                continue
            found = continuation(
                places, min(most, int(self._factor * places.length)), self._min_prob
            )
            if found.score > best.score:
                best = found
        return best.tokens

    def is_ready(self, request: Request) -> bool:
        """Whether its text goes on as one before, by now."""
        return bool(self._propose(request, 1))

    def forget(self, request: Request) -> None:
        """Keep the answer, with what it follows."""
        self._own.pop(request.number, None)
        answer = request.chain.tokens[max(request.num_prompt_tokens - self._depth, 0) :]
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
    """What answers are shared under: the first page, or the salt where the prompt has none."""
    chain = request.chain
    has_page = request.num_prompt_tokens >= chain.page_size
    return chain.digests(1)[0] if has_page else chain.root


def _younger_half(text: Occurrences) -> Occurrences:
    younger = Occurrences(text.width)
    younger.extend(text.text[len(text) // 2 :])
    return younger
