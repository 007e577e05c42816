"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from tokenizers import decoders

from milepost.engine.outputs import Logprob
from milepost.engine.processes import Delta
from milepost.engine.text import BYTE_LEVEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from milepost.server.generation import Generation
    from milepost.server.service import Service

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

Entry = dict[int, Logprob]


class TokenBytes:
    """The bytes of each token of a vocabulary. A token that is part of a character has no text that
    shows them.

    Supports byte-level vocabularies (each character of a token's name stands for a byte), and
    tokens that are named after their byte.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = isinstance(decoder, decoders.ByteLevel)
        self._names = {id_: name for name, id_ in tokenizer.get_vocab().items()}
        self._added = {id_: added.content for id_, added in tokenizer.added_tokens_decoder.items()}

    def of(self, token_id: int, text: str) -> list[int] | None:
        """Returns the bytes of a token that is decoded to `text`, or None if they are unknown."""
        if token_id in self._added:
            return list(self._added[token_id].encode())
        name = self._names.get(token_id, "")
        if self._is_byte_level and all(character in BYTE_LEVEL for character in name):
            return [BYTE_LEVEL[character] for character in name]
        if _NAMED_BYTE.fullmatch(name):
            return [int(name[3:5], 16)]
        return None if "\ufffd" in text else list(text.encode())


_NAMED_BYTE = re.compile("<0x[0-9A-F]{2}>")


def chat_content(delta: Delta, num_top: int, octets: TokenBytes) -> list[dict[str, Any]]:
    """Returns `logprobs.content` of a chat choice: an object per token."""
    return [_chat_token(entry, num_top, octets) for entry in delta.logprobs or ()]


def _chat_token(entry: Entry, num_top: int, octets: TokenBytes) -> dict[str, Any]:
    token_id, chosen = next(iter(entry.items()))
    tops = [_token(id_, logprob, octets) for id_, logprob in _tops(entry, num_top)]
    return {**_token(token_id, chosen, octets), "top_logprobs": tops}


def _token(token_id: int, logprob: Logprob, octets: TokenBytes) -> dict[str, Any]:
    text = _text(token_id, logprob)
    return {
        "token": text,
        "logprob": _finite(logprob.logprob),
        "bytes": octets.of(token_id, text),
    }


class TokensOfTexts:
    """Assigns the tokens of one answer to the texts found in it, in order."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Text that each token adds: a character comes with its last byte."""
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            self._entries.append(entry)
            self._texts.append(self._decode(bytes(entry["bytes"] or entry["token"].encode())))

    def claim(self, text: str) -> list[dict[str, Any]] | None:
        """Returns the next tokens that spell a text, including those cut by its borders. Skips the
        tokens before them. Returns None if no tokens spell the text."""
        at = "".join(self._texts).find(text)
        if at < 0:
            return None
        ends = list(accumulate(map(len, self._texts)))
        start, end = bisect_right(ends, at), bisect_left(ends, at + len(text)) + 1
        while start and not self._texts[start - 1]:  # first bytes of a character
            start -= 1
        claimed = self._entries[start:end]
        del self._entries[:end], self._texts[:end]
        return claimed


def extend_completion(
    known: dict[str, Any] | None, delta: Delta, num_top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """Returns `logprobs` of a completion choice (a list per property) with the delta's tokens
    added, and the new offset. `offset` counts the characters of the tokens before."""
    logprobs = known or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in delta.logprobs or ():
        token_id, logprob = next(iter(entry.items()))
        text = _text(token_id, logprob)
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(_finite(logprob.logprob))
        tops = {_text(id_, top): _finite(top.logprob) for id_, top in _tops(entry, num_top)}
        tops.setdefault(text, _finite(logprob.logprob))
        logprobs["top_logprobs"].append(tops)
        logprobs["text_offset"].append(offset)
        offset += len(text)
    return logprobs, offset


def by_id(delta: Delta) -> Delta:
    """Returns the delta without texts in its logprobs, so that each token is named by its id."""
    return replace(delta, logprobs=[_without_texts(entry) for entry in delta.logprobs or ()])


def _without_texts(entry: Entry) -> Entry:
    return {id_: replace(logprob, decoded_token=None) for id_, logprob in entry.items()}


def _tops(entry: Entry, num_top: int) -> list[tuple[int, Logprob]]:
    """Returns the likeliest tokens of an entry, best first."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    return [item for item in ranked if (item[1].rank or 0) <= num_top][:num_top]


def _text(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(value: float) -> float:
    return max(value, LOWEST)


# --- prompts --------------------------------------------------------------------------------------


async def scores_of(service: Service, generation: Generation, number: int) -> list[Entry | None]:
    """Returns log-probabilities of a prompt's tokens, with their texts."""
    entries = generation.prompt_logprobs[number]
    if service.tokenizer is None:
        return entries
    size = sum(map(len, filter(None, entries)))
    return await service.encoder.with_tokenizer(
        lambda tokenizer: with_texts(entries, tokenizer), size
    )


def with_texts(
    entries: Sequence[Entry | None], tokenizer: PreTrainedTokenizerBase
) -> list[Entry | None]:
    """Returns the entries of a prompt with the text of every token."""
    ids = {id_ for entry in entries if entry is not None for id_ in entry}
    texts = {id_: str(tokenizer.decode([id_])) for id_ in sorted(ids)}
    return [
        entry
        and {id_: replace(logprob, decoded_token=texts[id_]) for id_, logprob in entry.items()}
        for entry in entries
    ]


def of_prompt(entries: Sequence[Entry | None], num_top: int) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: for each token but the first an object by token id."""
    return [None if entry is None else _by_id(entry, num_top) for entry in entries]


def _by_id(entry: Entry, num_top: int) -> dict[str, Any]:
    sampled = next(iter(entry.items()))
    kept = dict([sampled, *_tops(entry, num_top)])
    return {
        str(id_): {
            "logprob": _finite(one.logprob),
            "rank": one.rank,
            "decoded_token": one.decoded_token,
        }
        for id_, one in kept.items()
    }


def text_of(entry: Entry) -> str:
    """Returns the text of the token that an entry is about."""
    token_id, logprob = next(iter(entry.items()))
    return _text(token_id, logprob)


def echoed(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    first: str,
    num_top: int,
    *,
    is_by_id: bool = False,
) -> tuple[dict[str, Any], int]:
    """Returns `logprobs` of a completion choice that begins with its prompt, and its length. The
    `first` token has no log-probability, so its text is passed in."""
    if is_by_id:
        first = f"token_id:{token_ids[0]}"
    known: dict[str, Any] = {
        "tokens": [first],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    delta = Delta(0, "", list(token_ids), [entry for entry in entries if entry is not None])
    return extend_completion(known, by_id(delta) if is_by_id else delta, num_top, len(first))
