"""Requests with tokens, and nothing that runs them."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.cache.tree import Chain
from milepost.pictures import Picture
from milepost.scheduler.request import Request

PAGE_SIZE = 16
_next = iter(range(10**6))


def request(
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    salt: str = "",
    pictures: Sequence[Picture] = (),
) -> Request:
    """With a number of its own, as the scheduler would set it."""
    chain = Chain(prompt, PAGE_SIZE, salt, pictures=pictures)
    made = Request(id="r", chain=chain, max_tokens=1000)
    made.number = next(_next)
    for token in answer:
        made.extend([token])
    return made
