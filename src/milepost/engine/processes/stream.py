"""Whatever callers wait for: a stream of the outputs of prompts, as they come from the engine's
process, and answers to questions.

Outputs that have arrived and were not read yet are joined, so a slow reader takes no more memory
than its completions are long. On request they are kept step by step instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from milepost.engine.outputs import Output, joined
from milepost.engine.processes.wire import Ask, Question, Reply
from milepost.errors import MilepostError


class Stream:
    """The outputs of the prompts of one `EngineClient.add`, until the last has ended.

    Each iteration yields what has arrived since the last one: pairs of a prompt's index and its
    output, at most one per prompt. Outputs that arrive faster than they are read are joined; with
    `keeps_steps`, each is of one step, however slow the reader is. Raises the error passed to
    `fail`, after all that arrived before it has been read. Always `close` it. `forget` drops it,
    and aborts those of its requests that are not over.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        num_answers: int,
        forget: Callable[[Stream], None],
        *,
        keeps_steps: bool = False,
    ) -> None:
        self.numbers = tuple(numbers)
        self.num_answers = num_answers
        self.open = set(numbers)
        """Numbers of the requests whose last output has not arrived."""
        self._forget = forget
        self._keeps_steps = keeps_steps
        self._pending: dict[int, deque[Output]] = {number: deque() for number in numbers}
        self._news = asyncio.Event()
        self._error: MilepostError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> AsyncIterator[list[tuple[int, Output]]]:
        return self

    async def __anext__(self) -> list[tuple[int, Output]]:
        while not (found := self._taken()):
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return found

    def _taken(self) -> list[tuple[int, Output]]:
        pending = enumerate(self._pending.values())
        return [(index, outputs.popleft()) for index, outputs in pending if outputs]

    async def begun(self) -> None:
        """Waits until something has arrived, without taking it. Raises the error of a stream that
        has nothing else."""
        await self._news.wait()
        if self._error is not None and not any(self._pending.values()):
            raise self._error

    def put(self, output: Output) -> None:
        """Takes an output that the engine has sent."""
        pending = self._pending[output.number]
        if pending and not self._keeps_steps:
            output = joined(pending.pop(), output)
        pending.append(output)
        if output.finished:
            self.open.discard(output.number)
        self._news.set()

    def fail(self, error: MilepostError) -> None:
        """Ends the stream with an error, once what has arrived is read."""
        if self.open and self._error is None:
            self._error = error
            self._news.set()

    def abort(self) -> None:
        """Ends the stream with what has arrived so far; the engine ends its requests."""
        self._forget(self)
        self.open.clear()
        self._news.set()

    def fail_after(self, seconds: float, error: MilepostError) -> None:
        """Ends the stream with an error unless it is over by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def close(self) -> None:
        """Aborts unfinished requests; the engine frees them before its next step."""
        if self._timer is not None:
            self._timer.cancel()
        self._forget(self)


WATCHES = 4
"""Number of times per `step_timeout_s` that the engine is asked for a sign of life."""


class Questions:
    """Sends questions to the engine's process with `send`, and waits for the answers."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._num_asked = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._has_heard = False

    def send(self, what: Question) -> int:
        """Asks without waiting for the answer. Returns the question's id."""
        self._num_asked += 1
        self._send(Ask(id=self._num_asked, what=what))
        return self._num_asked

    async def ask(self, what: Question) -> Reply:
        """Sends a question and returns the answer. Raises the error passed to `fail` meanwhile."""
        id_ = self.send(what)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = future
        try:
            return await future
        finally:
            self._waiting.pop(id_, None)

    def answer(self, reply: Reply) -> None:
        """Takes an answer that has arrived."""
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, error: MilepostError) -> None:
        """Ends every question that has no answer with an error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def note_life(self) -> None:
        """Records that the engine has sent something."""
        self._has_heard = True

    async def until_silent_for(self, limit_s: float) -> None:
        """Returns once the engine has sent nothing for `limit_s`, although it was asked. Questions
        are answered between steps. Only whole waits count as silence, since time in which this
        process slept too is no sign of a hang."""
        num_silent = 0
        while num_silent < WATCHES:
            self._has_heard = False
            self.send("alive")
            await asyncio.sleep(limit_s / WATCHES)
            num_silent = 0 if self._has_heard else num_silent + 1
