"""The questions to the engine's process that have no answer yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from milepost.engine.processes.wire import Ask, Question, Reply
from milepost.errors import MilepostError

WATCHES = 4
"""Number of times per `step_timeout_s` that the engine is asked for a sign of life."""


class Questions:
    """Sends questions with `send`, and waits for the answers."""

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
        """Returns once the engine has sent nothing for this long, although it was asked. Questions
        are answered between steps. Only whole waits count as silence, since time in which this
        process slept too is no sign of a hang."""
        num_silent = 0
        while num_silent < WATCHES:
            self._has_heard = False
            self.send("alive")
            await asyncio.sleep(limit_s / WATCHES)
            num_silent = 0 if self._has_heard else num_silent + 1
