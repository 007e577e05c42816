"""Schedules the use of the tokenizer, and stops work whose client has left.

Tokenizing releases the interpreter lock, but takes a second or more per megabyte, and a tokenizer
must not be used by two threads at once. So short texts have their own thread, which long ones never
delay, and long texts have a process, which is killed when their client leaves. Conversations are
rendered only in processes: short ones, each for a limited time, in their own process, and those
that take longer in the process of long texts.

Callers wait in order of the work ahead of them on arrival, their own included, so a text is
overtaken by no more than its own length of other text. A cancelled caller loses its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import heapq
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import structs

from milepost.engine.prompts import Prompt
from milepost.engine.text.conversations import Rendered, Template, Unrendered
from milepost.engine.text.process import Encoded, Start, TextProcess, Texts

T = TypeVar("T")

MAX_SHORT = 2**16
"""Largest number of characters of a short text."""
SHORT_S = 1.0
"""Processor time after which a short conversation counts as long; most take milliseconds."""


@dataclass(order=True, slots=True)
class _Place:
    rank: int
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class Turns:
    """Lets one caller run at a time: the one with the least work first, within the bound above."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._is_taken = False
        self._work_begun = 0
        self._num_places = 0

    @property
    def num_waiting(self) -> int:
        return sum(not place.turn.done() for place in self._places)

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits for a turn for work of `size`."""
        if self._is_taken:
            self._num_places += 1
            turn = asyncio.get_running_loop().create_future()
            place = _Place(self._work_begun + size, self._num_places, turn)
            heapq.heappush(self._places, place)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had its turn already
                    self._next()
                raise
        self._is_taken = True
        self._work_begun += size
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._is_taken = False
        while self._places:
            place = heapq.heappop(self._places)
            if not place.turn.done():
                place.turn.set_result(None)
                self._is_taken = True
                return


class Lane:
    """A thread that does one piece of work at a time."""

    def __init__(self, name: str) -> None:
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def num_waiting(self) -> int:
        return self._turns.num_waiting

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Returns the result of `work`, which has this size. The first call starts the thread."""
        async with self._turns.turn(size):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Stops: no further work is started."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """A thread for short texts, a thread and a process for long ones, and a process for short
    conversations. Text in messages that matches `special` is plain text."""

    def __init__(self, tokenizer: Any, special: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._long_tokenizer: Any = None
        self._short, self._long = Lane("tokenizer"), Lane("long-tokenizer")
        self._is_fast = getattr(tokenizer, "is_fast", False)
        self._process, self._turns = TextProcess(self._start), Turns()
        self._chats, self._chat_turns = TextProcess(self._start), Turns()
        self._begun: asyncio.Future[tuple[Rendered, Prompt | None]] | None = None

    def _start(self) -> Start:
        """Returns what both processes work with."""
        tokenizer, template = self._tokenizer, None
        if self.can_render:
            known = tokenizer.special_tokens_map.items()
            template = Template(
                chat_template=tokenizer.chat_template,
                special_tokens={name: _plain(token) for name, token in known},
                special=self._special,
            )
        plain = tokenizer.backend_tokenizer.to_str() if self._is_fast else None
        return Start(tokenizer_json=plain, template=template)

    async def run(self, work: Callable[[Any], T], size: int) -> T:
        """Returns the result of `work` with a tokenizer, in a thread; `size` is the length of its
        text."""
        if size <= MAX_SHORT:
            return await self._short.run(lambda: work(self._tokenizer), size)
        return await self._long.run(lambda: work(self._copy()), size)

    @property
    def can_be_stopped(self) -> bool:
        """Whether `encode` can be used: not with tokenizers that are written in Python."""
        return self._is_fast

    @property
    def can_render(self) -> bool:
        """Whether `render` can be used: not with tokenizers that have no template, or have their
        own code for rendering."""
        kind: type = type(self._tokenizer)
        return bool(getattr(self._tokenizer, "chat_template", None)) and _renders_as_all_do(kind)

    async def render(self, asked: Unrendered, size: int) -> tuple[Rendered, Prompt | None]:
        """Returns a conversation of `size` characters as text, and also as a prompt if the text is
        short."""
        if size <= MAX_SHORT:
            short = structs.replace(asked, limit_s=min(SHORT_S, asked.limit_s))
            async with self._chat_turns.turn(size):
                rendered, prompt = await self._render_to_its_end(short)
            if not rendered.is_slow or asked.limit_s <= SHORT_S:
                return rendered, prompt
        async with self._turns.turn(size):
            return await self._process.render(asked)

    async def _render_to_its_end(self, asked: Unrendered) -> tuple[Rendered, Prompt | None]:
        """Renders even if the caller is cancelled meanwhile, since the next caller then waits less
        than for a new process."""
        if self._begun is not None:
            await asyncio.wait([self._begun])
        self._begun = asyncio.ensure_future(self._chats.render(asked))
        self._begun.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._begun)

    async def encode(self, texts: Texts) -> list[Encoded]:
        """Returns the tokens of long texts; the work ends when its caller is cancelled."""
        assert self._is_fast, "only a fast tokenizer runs in a process of its own"
        async with self._turns.turn(sum(len(text.text) for text in texts.texts)):
            return await self._process.encode(texts)

    def _copy(self) -> Any:
        if self._long_tokenizer is None:
            self._long_tokenizer = copy.deepcopy(self._tokenizer)
        return self._long_tokenizer

    async def close(self) -> None:
        self._short.close()
        self._long.close()
        for process in (self._process, self._chats):
            await process.close()


def _plain(token: Any) -> Any:
    return [str(each) for each in token] if isinstance(token, list | tuple) else str(token)


@functools.cache
def _renders_as_all_do(kind: type) -> bool:
    from transformers import PreTrainedTokenizerBase  # slow, but imported by now

    names = ("apply_chat_template", "get_chat_template")
    return all(getattr(kind, n, None) is getattr(PreTrainedTokenizerBase, n) for n in names)
