"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from typing import Any

from milepost.engine.outputs import Logprob
from milepost.engine.wire import Delta

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Entry = dict[int, Logprob]


def chat_content(delta: Delta, num_top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice: an object per token."""
    return [_chat_token(entry, num_top) for entry in delta.logprobs or ()]


def _chat_token(entry: Entry, num_top: int) -> dict[str, Any]:
    token_id, own = next(iter(entry.items()))
    tops = [_token(id_, logprob) for id_, logprob in _tops(entry, num_top)]
    return {**_token(token_id, own), "top_logprobs": tops}


def _token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(token_id, logprob)
    octets = None if "\ufffd" in text else list(text.encode())  # part of a character has no text
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": octets}


def extend_completion(
    known: dict[str, Any] | None, delta: Delta, num_top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion choice (a list per property) with the delta's tokens added.

    `offset` counts the characters of the tokens before; the second result is the one after.
    """
    logprobs = known or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in delta.logprobs or ():
        token_id, own = next(iter(entry.items()))
        text = _text(token_id, own)
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(_finite(own.logprob))
        tops = {_text(id_, top): _finite(top.logprob) for id_, top in _tops(entry, num_top)}
        tops.setdefault(text, _finite(own.logprob))
        logprobs["top_logprobs"].append(tops)
        logprobs["text_offset"].append(offset)
        offset += len(text)
    return logprobs, offset


def _tops(entry: Entry, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of an entry, best first."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    return [item for item in ranked if (item[1].rank or 0) <= num_top][:num_top]


def _text(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(value: float) -> float:
    return max(value, LOWEST)
