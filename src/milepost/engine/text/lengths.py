"""Lengths of texts: in characters, and a lower bound on the number of tokens, found without
tokenizing."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np

_CHUNK = 2**20
_NFC = {"type": "NFC"}
_KEEPS_LENGTH = ("Prepend", "Replace")
"""Normalizers of SentencePiece vocabularies: none makes a text shorter, if what replaces a pattern
is no shorter than it."""


class FewestTokens:
    """A lower bound for byte-level vocabularies and those that fall back to bytes; 0 for others.

    A token of n bytes takes at most 1 / n of a token for each of its bytes. So each byte counts as
    one over the length of the longest token that it stands in, and the sum over a text's bytes is
    never more than the number of its tokens. Where tokens are made of characters, each counts as
    one over the length of the longest token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._shares: np.ndarray | None = None
        self._longest: int | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            plain = json.loads(backend.to_str())
            if _is_byte_level(plain):
                self._shares = _shares(plain)
            elif _falls_back_to_bytes(plain):
                self._longest = max(map(len, (*plain["model"]["vocab"], *_added(plain))))
            self._composes = plain.get("normalizer") is not None

    def __call__(self, text: str) -> int:
        if self._longest is not None:
            return len(text) // self._longest
        if self._shares is None:
            return 0
        counts = np.zeros(256, np.int64)
        if self._composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        for start in range(0, len(text), _CHUNK):
            octets = text[start : start + _CHUNK].encode("utf-8", "replace")
            counts += np.bincount(np.frombuffer(octets, np.uint8), minlength=256)
        return math.floor(float(counts @ self._shares))


def _is_byte_level(plain: dict[str, Any]) -> bool:
    """Whether every byte of a text ends up in some token: a byte-level BPE that strips nothing."""
    if plain["model"].get("type") != "BPE" or plain.get("normalizer") not in (None, _NFC):
        return False
    if '"ByteLevel"' not in json.dumps(plain.get("pre_tokenizer")):
        return False
    return not _strips(plain)


def _falls_back_to_bytes(plain: dict[str, Any]) -> bool:
    """Whether a vocabulary falls back to bytes: no text is shortened before it is split, and every
    character ends up in some token."""
    normalizer = plain.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer.get("normalizers", [normalizer])
    is_kept = all(step["type"] in _KEEPS_LENGTH and _is_kept(step) for step in steps)
    has_bytes = plain["model"].get("type") == "BPE" and plain["model"].get("byte_fallback")
    pre_tokenizer = (plain.get("pre_tokenizer") or {"type": "Metaspace"})["type"]
    return bool(is_kept and has_bytes and pre_tokenizer == "Metaspace" and not _strips(plain))


def _is_kept(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {"String": ""}).get("String")
    return pattern is not None and len(step.get("content", "")) >= len(pattern)


def _strips(plain: dict[str, Any]) -> bool:
    """Whether a token takes more of a text than it has."""
    return any(token["lstrip"] or token["rstrip"] for token in plain["added_tokens"])


def _added(plain: dict[str, Any]) -> list[str]:
    return [token["content"] for token in plain["added_tokens"]]


def _shares(plain: dict[str, Any]) -> np.ndarray:
    """Returns, for each byte, 1 / the length of the longest token that contains it."""
    octets = BYTE_LEVEL
    longest = np.ones(256)
    tokens = [[octets[c] for c in token if c in octets] for token in plain["model"]["vocab"]]
    tokens += [list(text.encode()) for text in _added(plain)]
    for token in tokens:
        for octet in set(token):
            longest[octet] = max(longest[octet], len(token))
    return 1 / longest


def _byte_level() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [octet for octet in range(256) if octet not in plain]
    as_itself = {chr(octet): octet for octet in plain}
    return as_itself | {chr(256 + index): octet for index, octet in enumerate(others)}


BYTE_LEVEL = _byte_level()
"""Maps each character of a byte-level vocabulary to its byte: printable characters of Latin-1 stand
for themselves, and those from 256 on for the others (GPT-2's vocabulary, and all since)."""


_PLAIN = {int, float, bool, type(None)}


def text_length(value: Any) -> int:
    """Returns the length of all texts in a value, with one for each number. Lists of numbers or
    texts, which may have millions of items, are not walked one by one: an event loop may wait for
    this."""
    length, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, Mapping):
            todo += (list(item), list(item.values()))
        elif isinstance(item, list | tuple):
            kinds = set(map(type, item))
            if kinds == {str}:
                length += sum(map(len, item))
            elif kinds <= _PLAIN:
                length += len(item)
            else:
                todo += item
        elif type(item) in _PLAIN:
            length += 1
    return length
