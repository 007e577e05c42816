"""Renders conversations and tokenizes texts in a process of its own, which can be ended.

A megabyte of text takes a tokenizer one to ten seconds, and nothing can interrupt it; a chat
template may take for ever (`conversations`). The process (`main`) imports `tokenizers`, and
transformers with the first conversation, so it starts quickly. Memory that a text needed is
returned to the system.

`TextProcess` is the other side, in an event loop.
"""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from milepost.engine import heap
from milepost.engine.child import Child, answer, messages
from milepost.engine.prompts import Prompt
from milepost.engine.text.chat import tokens_before
from milepost.engine.text.conversations import Rendered, Renderer, Template, Unrendered, too_slow
from milepost.errors import InvalidRequestError

MAX_AT_ONCE = 2**18
"""Number of bytes of token ids that the event loop waits for."""
PATIENCE = 10.0
"""Factor by which work may take longer than its processor time, on a busy machine."""


class Text(msgspec.Struct, array_like=True, frozen=True):
    """Texts to tokenize."""

    text: str
    ends: list[int] = []
    """Positions in the text. The number of tokens before each is returned."""


class Texts(msgspec.Struct, array_like=True, frozen=True, tag="texts"):
    texts: list[Text]
    add_special_tokens: bool
    max_tokens: int | None
    """The ids of a text with more tokens are not returned, only their number."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer and template of the process."""

    tokenizer_json: str | None
    """The tokenizer as JSON; None for one written in Python, and then nothing is tokenized."""
    template: Template | None


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of one text."""

    num_tokens: int
    ids: bytes
    """Token ids as uint32; empty if there are too many."""
    counts: list[int]


class _ChatReply(msgspec.Struct, array_like=True, frozen=True):
    rendered: Rendered
    replies: list[_Reply] | None = None
    """The tokens of its pieces, unless they were not to be tokenized."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text's tokens."""

    num_tokens: int
    token_ids: list[int]
    """Empty if there are more than `max_tokens`."""
    counts: list[int]


class TextProcess:
    """Serves one request at a time. `start` is called when the process starts. `close` it at the
    end."""

    def __init__(self, start: Callable[[], Start]) -> None:
        self._start = start
        self._child = Child("milepost.engine.text")
        self._encoder = msgspec.msgpack.Encoder()
        self._texts = msgspec.msgpack.Decoder(list[_Reply])
        self._chats = msgspec.msgpack.Decoder(_ChatReply)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def start(self) -> None:
        """Starts the process now; otherwise the first request starts it."""
        if self._child.pid is None:
            start = await asyncio.to_thread(lambda: self._encoder.encode(self._start()))
            await self._child.start()
            await self._child.ask(start)

    async def encode(self, texts: Texts) -> list[Encoded]:
        """Raises InvalidRequestError, and UnicodeError for what is no text. When its caller is
        cancelled the work ends at once."""
        message = self._encoder.encode(texts)
        await self.start()
        reply_bytes, status = await self._child.ask(message)
        if reply_bytes is None:
            raise InvalidRequestError(
                f"the text could not be tokenized: its process ended with status {status}. It may "
                "need more memory than there is: send less text, or token ids"
            )
        replies = self._texts.decode(reply_bytes)
        if len(reply_bytes) > MAX_AT_ONCE:
            return await asyncio.to_thread(lambda: list(map(_encoded, replies)))
        return list(map(_encoded, replies))

    async def render(self, asked: Unrendered) -> tuple[Rendered, Prompt | None]:
        """Returns a conversation as text, and as a prompt if it was tokenized. The work ends at
        once if its caller is cancelled."""
        message = self._encoder.encode(asked)
        try:
            await self.start()
            reply_bytes, status = await self._child.ask(message, PATIENCE * asked.limit_s)
        except TimeoutError:
            return too_slow(asked.limit_s), None
        if reply_bytes is None:
            if status == -signal.SIGVTALRM:
                return too_slow(asked.limit_s), None
            why = f"the chat template ended its process with status {status}"
            return Rendered(refusal=why), None
        reply = self._chats.decode(reply_bytes)
        if reply.replies is None:
            return reply.rendered, None
        encoded = [_encoded(each) for each in reply.replies]
        composed = reply.rendered.composed
        return reply.rendered, composed.prompt([(one.token_ids, one.counts) for one in encoded])

    async def close(self) -> None:
        await self._child.close()


def _encoded(reply: _Reply) -> Encoded:
    """Returns the tokens, made in pieces that other threads need not wait for."""
    ids: list[int] = []
    for start in range(0, len(reply.ids), MAX_AT_ONCE):
        ids += array("I", reply.ids[start : start + MAX_AT_ONCE])
    return Encoded(reply.num_tokens, ids, reply.counts)


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Reads the tokenizer and the template, then serves requests."""
    asked = messages()
    work = _Work(msgspec.msgpack.decode(next(asked), type=Start))
    answer(b"")
    decoder, encoder = msgspec.msgpack.Decoder(Texts | Unrendered), msgspec.msgpack.Encoder()
    for message in asked:
        wanted = decoder.decode(message)
        if isinstance(wanted, Texts):
            answer(encoder.encode(work.tokenize(wanted)))
            heap.give_back()
        else:
            answer(_sent(encoder, work.render(wanted)))
            if len(message) > wanted.max_tokenized:
                heap.give_back()


def _sent(encoder: msgspec.msgpack.Encoder, reply: _ChatReply) -> bytes:
    try:
        return encoder.encode(reply)
    except UnicodeError as error:
        refusal = f"the text is not valid Unicode: {error}"
        return encoder.encode(_ChatReply(Rendered(refusal=refusal)))


class _Work:
    def __init__(self, start: Start) -> None:
        self._template = start.template
        self._renderer: Renderer | None = None
        self._tokenizer: Any = None
        if start.tokenizer_json is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(start.tokenizer_json)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()

    def tokenize(self, texts: Texts) -> list[_Reply]:
        return [self._tokenize(text, texts) for text in texts.texts]

    def render(self, asked: Unrendered) -> _ChatReply:
        if self._renderer is None:
            assert self._template is not None, "conversations have a template"
            self._renderer = Renderer(self._template)
            heap.settle()
        rendered = self._renderer.render(asked)
        composed = rendered.composed
        if rendered.refusal or self._tokenizer is None or composed.length > asked.max_tokenized:
            return _ChatReply(rendered)
        texts = Texts(list(map(Text, composed.pieces, composed.places())), False, None)
        try:
            return _ChatReply(rendered, self.tokenize(texts))
        except UnicodeError as error:
            return _ChatReply(Rendered(refusal=f"the text is not valid Unicode: {error}"))

    def _tokenize(self, text: Text, texts: Texts) -> _Reply:
        encoding = self._tokenizer.encode(text.text, add_special_tokens=texts.add_special_tokens)
        num_tokens = len(encoding)
        if texts.max_tokens is not None and num_tokens > texts.max_tokens:
            return _Reply(num_tokens, b"", [])
        counts = tokens_before(encoding.offsets, text.ends) if text.ends else []
        return _Reply(num_tokens, array("I", encoding.ids).tobytes(), counts)
