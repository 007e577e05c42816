"""One request of the engine process, as an async stream of its answers' deltas.

A stream merges what has arrived and was not read yet into one piece per answer, so a slow reader
costs no more memory than its answer is long; or keeps it step by step, on request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from milepost.engine.processes.wire import Delta, Output
from milepost.errors import MilepostError

if TYPE_CHECKING:
    from milepost.engine.processes.client import EngineClient


class StreamBell:
    """Wakes the one task that waits for it; a ring that nobody waited for is kept."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._has_rung = False

    def ring(self) -> None:
        self._has_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._has_rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_rung = False


class Stream:
    """The outputs of one request, from `EngineClient.add` to its end.

    Iterate to take them, or `take` them when the bell has rung, which several streams can share.
    `close` it, whatever happens. Outputs that come faster than they are taken are joined, unless
    it `keeps_steps`: then each is of one step, however busy the reader is.
    """

    def __init__(
        self,
        id_: int,
        num_answers: int,
        client: EngineClient,
        bell: StreamBell,
        *,
        keeps_steps: bool = False,
    ) -> None:
        self.id = id_
        self.num_answers = num_answers
        self._client = client
        self._bell = bell
        self._pending: deque[Output] = deque()
        self._keeps_steps = keeps_steps
        self._error: MilepostError | None = None
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        """The next output. Raises as `take`."""
        while (output := self.take()) is None:
            if self._is_over:
                raise StopAsyncIteration
            await self._bell.wait()
        return output

    def take(self) -> Output | None:
        """What has arrived since the last call, or the first of its steps.

        Raises what `fail` was given, once all is taken: InvalidRequestError, EngineDeadError.
        """
        output = self._pending.popleft() if self._pending else None
        if self._error is not None and output is None:
            raise self._error
        if self._error is not None or self._pending:
            self._bell.ring()  # what is left may have rung with this one
        return output

    def check(self) -> None:
        """Raise what `take` would raise next."""
        if self._error is not None and not self._pending:
            raise self._error

    def put(self, output: Output) -> None:
        """Take over what the engine sent."""
        if self._pending and not self._keeps_steps:
            output = _joined(self._pending.pop(), output)
        self._pending.append(output)
        self._is_over = output.finished
        self._bell.ring()

    def fail(self, error: MilepostError) -> None:
        """End the stream with an error, once what has arrived is taken."""
        if not self._is_over and self._error is None:
            self._error = error
            self._bell.ring()

    def close(self) -> None:
        """Give the request up if it is not over; the engine frees it before its next step."""
        self._client.forget(self, is_over=self._is_over)


def _joined(first: Output, second: Output) -> Output:
    """Two outputs of one request, as one."""
    deltas = {delta.index: delta for delta in first.deltas}
    for delta in second.deltas:
        known = deltas.get(delta.index)
        deltas[delta.index] = delta if known is None else _joined_delta(known, delta)
    return Output(
        id=first.id,
        deltas=list(deltas.values()),
        finished=second.finished,
        report=first.report or second.report,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        kv_transfer_params=first.kv_transfer_params or second.kv_transfer_params,
    )


def _joined_delta(first: Delta, second: Delta) -> Delta:
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *second.logprobs]
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        num_draft_tokens=first.num_draft_tokens + second.num_draft_tokens,
        num_accepted_tokens=first.num_accepted_tokens + second.num_accepted_tokens,
    )
