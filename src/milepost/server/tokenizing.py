"""Shares the tokenizer out: who waits for whom, and what is refused before it is begun.

Tokenizing gives up the interpreter lock, but takes a second for some megabytes, and a tokenizer
must not be used from two threads at once. So short texts have a thread and a tokenizer of their
own, which long ones never hold up. Among those that wait, the one comes first that had the least
work before it when it came, its own counted in: a text is overtaken by no more than its own length
of others. A caller that is cancelled gives up its place.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SHORT = 2**16
"""Characters that count as short."""


@dataclass(order=True, slots=True)
class _Piece:
    rank: int
    number: int
    size: int = field(compare=False)
    run: Callable[[], None] = field(compare=False)


class Lane:
    """A thread that does the pieces of work it is given, least work first, but fairly."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[_Piece] = []
        self._changed = threading.Condition()
        self._work_begun = 0
        self._num_pieces = 0
        self._is_open = True
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._pieces)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, which costs about `size`. The first one starts the thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def run() -> None:
            if future.cancelled():
                return
            try:
                result, problem = work(), None
            except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
                result, problem = None, error
            loop.call_soon_threadsafe(settle, result, problem)

        piece = self._put(run, size)
        try:
            return await future
        except asyncio.CancelledError:
            self._drop(piece)
            raise

    def _put(self, run: Callable[[], None], size: int) -> _Piece:
        with self._changed:
            self._num_pieces += 1
            piece = _Piece(self._work_begun + size, self._num_pieces, size, run)
            heapq.heappush(self._pieces, piece)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return piece

    def _drop(self, piece: _Piece) -> None:
        with self._changed:
            if piece in self._pieces:
                self._pieces.remove(piece)
                heapq.heapify(self._pieces)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._is_open and not self._pieces:
                    self._changed.wait()
                if not self._is_open:
                    return
                piece = heapq.heappop(self._pieces)
                self._work_begun += piece.size
            piece.run()

    def close(self) -> None:
        """Nothing more is begun."""
        with self._changed:
            self._is_open = False
            self._pieces.clear()
            self._changed.notify()


class Lanes:
    """Two lanes with a tokenizer each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._long_tokenizer: Any = None
        self._short, self._long = Lane("tokenizer"), Lane("long-tokenizer")

    async def run(self, work: Callable[[Any], T], size: int) -> T:
        """The result of `work` with a tokenizer; `size` is the length of its text."""
        if size <= MAX_SHORT:
            return await self._short.run(lambda: work(self._tokenizer), size)
        return await self._long.run(lambda: work(self._copy()), size)

    def _copy(self) -> Any:
        if self._long_tokenizer is None:
            self._long_tokenizer = copy.deepcopy(self._tokenizer)
        return self._long_tokenizer

    def close(self) -> None:
        self._short.close()
        self._long.close()
