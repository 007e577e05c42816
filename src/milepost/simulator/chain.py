"""Chains of requests whose trace has page ids instead of tokens.

A page's digest stands for its id, which stands for everything before it; so two chains agree as far
as the trace says. The tokens of a page are its id over and over, so they are equal if the pages
are, and differ if not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as concatenated

from milepost.cache.tree import TOKEN_BYTES, Chain
from milepost.simulator.trace import TraceRequest


class TraceChain(Chain):
    """A request's tokens; `digests` are those of the whole trace, by page id."""

    __slots__ = ("_request", "_shared")

    def __init__(self, request: TraceRequest, page_size: int, digests: list[bytes]) -> None:
        super().__init__((), page_size, pictures=request.pictures)
        self.tokens = range(request.input_length)  # type: ignore[assignment]
        self._request = request
        self._shared = digests

    def extend(self, tokens: Sequence[int]) -> None:
        """Grows by the number of tokens; a trace does not say what they are."""
        self.tokens = range(len(self.tokens) + len(tokens))  # type: ignore[assignment]

    def page_id(self, index: int) -> int:
        """Returns the id of a page, full or not."""
        request = self._request
        after = index - len(request.page_ids)
        if after < 0:
            return request.page_ids[index]
        if after < len(request.answer_ids):
            return request.answer_ids[after]
        return request.own_id + after

    def token_bytes(self, start: int, end: int) -> bytes:
        size = self.page_size
        end = min(end, len(self.tokens))
        if start >= end:
            return b""
        first, last = start // size, (end - 1) // size
        if first == last:
            return self.page_id(first).to_bytes(TOKEN_BYTES, "little") * (end - start)
        pages = b"".join(self._page_bytes(i) for i in range(first, last + 1))
        return pages[(start - first * size) * TOKEN_BYTES : (end - first * size) * TOKEN_BYTES]

    def page_contents(self, first: int, end: int) -> Iterator[bytes]:
        return map(self._page_bytes, range(first, end))

    def known_digests(self) -> list[bytes]:
        return self.full_digests()

    def _page_bytes(self, index: int) -> bytes:
        return self.page_id(index).to_bytes(TOKEN_BYTES, "little") * self.page_size

    def _extend(self, num_pages: int) -> None:
        known, shared, request = self._digests, self._shared, self._request
        if not known:
            ids = concatenated(request.page_ids, request.answer_ids)
            known.extend(shared[id_] for _, id_ in zip(range(num_pages), ids, strict=False))
        known.extend(shared[self.page_id(i)] for i in range(len(known), num_pages))
