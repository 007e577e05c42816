"""Tokenizes long texts in a process of its own, which is killed when nobody waits for it any more.

A megabyte of text takes a tokenizer one to ten seconds, and nothing can interrupt it. The process
(`python -m milepost.engine.text_process`) imports `tokenizers` and no more, so it starts quickly;
the first long text starts it. Memory that a text needed is returned to the system.

`TextProcess` is the other side, in an event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from milepost.engine import heap
from milepost.engine.chat import tokens_before
from milepost.engine.child import Child, answer, messages
from milepost.errors import InvalidRequestError


class Text(msgspec.Struct, array_like=True, frozen=True):
    """What is to be tokenized."""

    text: str
    ends: list[int] = []
    """Places in it; how many tokens lie before each is wanted."""


class Texts(msgspec.Struct, array_like=True, frozen=True):
    texts: list[Text]
    add_special_tokens: bool
    max_tokens: int | None
    """A text that has more is only counted."""


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    """Of one text."""

    num_tokens: int
    ids: bytes
    """As uint32, unless there are too many."""
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text's tokens."""

    num_tokens: int
    token_ids: list[int]
    """Empty where there are more than `max_tokens`."""
    counts: list[int]


class TextProcess:
    """Tokenizes one request's texts at a time. `close` it at the end."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._tokenizer_json = tokenizer_json
        self._child = Child("milepost.engine.text_process")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[_Reply])

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def encode(self, texts: Texts) -> list[Encoded]:
        """Raises InvalidRequestError, and UnicodeError for what is no text. When its caller is
        cancelled the work ends at once."""
        message = self._encoder.encode(texts)
        try:
            if self._child.pid is None:
                await self._child.start()
                tokenizer_json = await asyncio.to_thread(self._tokenizer_json)
                await self._child.ask(tokenizer_json.encode())
            found = await self._child.ask(message)
        except BaseException:
            self._child.kill()
            raise
        if found is None:
            status = await self._child.ended()
            raise InvalidRequestError(
                f"the text could not be tokenized: its process ended with status {status}. It may "
                "need more memory than there is: send less text, or token ids"
            )
        return [_encoded(reply) for reply in self._decoder.decode(found)]

    async def close(self) -> None:
        await self._child.close()


def _encoded(reply: _Reply) -> Encoded:
    return Encoded(reply.num_tokens, array("I", reply.ids).tolist(), reply.counts)


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Take the tokenizer, then tokenize what comes."""
    from tokenizers import Tokenizer

    asked = messages()
    tokenizer = Tokenizer.from_str(next(asked).decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    answer(b"")
    decoder, encoder = msgspec.msgpack.Decoder(Texts), msgspec.msgpack.Encoder()
    for message in asked:
        texts = decoder.decode(message)
        answer(encoder.encode([_tokenize(tokenizer, text, texts) for text in texts.texts]))
        heap.give_back()


def _tokenize(tokenizer: Any, text: Text, texts: Texts) -> _Reply:
    encoding = tokenizer.encode(text.text, add_special_tokens=texts.add_special_tokens)
    num_tokens = len(encoding)
    if texts.max_tokens is not None and num_tokens > texts.max_tokens:
        return _Reply(num_tokens, b"", [])
    counts = tokens_before(encoding.offsets, text.ends) if text.ends else []
    return _Reply(num_tokens, array("I", encoding.ids).tobytes(), counts)


if __name__ == "__main__":
    main()
