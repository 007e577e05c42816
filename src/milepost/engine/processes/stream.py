"""The stream of one caller: the outputs of its prompts, as they come from the engine process.

What has arrived and was not read yet is joined, so a slow reader costs no more memory than its
completions are long; or it is kept step by step, on request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from milepost.engine.outputs import Output
from milepost.engine.processes.growing import joined
from milepost.errors import MilepostError


class Sender(Protocol):
    """The client that a stream belongs to."""

    def forget(self, stream: Stream) -> None:
        """Drops a stream, and aborts those of its requests that are not over."""


class Stream:
    """The outputs of the prompts of one `EngineClient.add`, until the last has ended.

    Each iteration yields what has arrived since the last one: pairs of a prompt's index and its
    output, at most one of each prompt. Raises what `fail` was given, once all that arrived before
    is read. `close` it in any case. Outputs that arrive faster than they are read are joined,
    unless it `keeps_steps`: then each is of one step, however busy the reader is.
    """

    def __init__(
        self, numbers: Sequence[int], num_answers: int, client: Sender, *, keeps_steps: bool = False
    ) -> None:
        self.numbers = tuple(numbers)
        self.num_answers = num_answers
        self.open = set(numbers)
        """Numbers of the requests whose last output has not arrived."""
        self._client = client
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
        """Waits until something has arrived, and leaves it. Raises the error of a stream that has
        nothing else."""
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
        """Ends the stream as it stands, once what has arrived is read; the engine ends its
        requests."""
        self._client.forget(self)
        self.open.clear()
        self._news.set()

    def fail_after(self, seconds: float, error: MilepostError) -> None:
        """Ends the stream with an error unless it is over by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def close(self) -> None:
        """Gives up what is not over; the engine frees it before its next step."""
        if self._timer is not None:
            self._timer.cancel()
        self._client.forget(self)
