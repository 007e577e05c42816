"""Requests with tokens, and nothing that runs them."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.cache.tree import Chain
from milepost.scheduler.request import Request

PAGE_SIZE = 16
_next = iter(range(10**6))


def request(prompt: Sequence[int], answer: Sequence[int] = (), salt: str = "") -> Request:
    """With a number of its own, as the scheduler would set it."""
    made = Request(id="r", chain=Chain(prompt, PAGE_SIZE, salt), max_tokens=1000)
    made.number = next(_next)
    for token in answer:
        made.extend([token])
    return made
