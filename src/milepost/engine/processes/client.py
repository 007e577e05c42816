"""The other end of the engine process: starts it, and turns its messages into async streams.

Everything here runs in one event loop. When the engine dies, each open stream, and each question,
raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from milepost import errors
from milepost.config import EngineConfig
from milepost.engine.metrics import Metric
from milepost.engine.processes import wire
from milepost.engine.processes.pixels import SentPixels
from milepost.engine.processes.starting import EngineProcess
from milepost.engine.processes.stream import Questions, Stream
from milepost.engine.prompts import Prompt
from milepost.engine.validation import Limits, validate
from milepost.errors import (
    EngineDeadError,
    InvalidRequestError,
    MilepostError,
    QueueFullError,
    RequestTimeoutError,
)
from milepost.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

READ_BYTES = 2**18


class EngineClient:
    """One engine process. `await start()` before anything else, `await close()` at the end.

    `max_waiting` bounds the answers that are accepted beyond the `max_num_seqs` that can run. An
    engine that gives no sign of life for `step_timeout_s` is killed (None: it is waited for).
    `on_death` is called once if the engine ends by itself, or is killed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_waiting: int = 1024,
        step_timeout_s: float | None = None,
        on_death: Callable[[str], None] = lambda _: None,
        make_engine: Callable[..., Any] | None = None,
    ) -> None:
        self.config = config
        self.max_in_flight = config.max_num_seqs + max_waiting
        self.num_in_flight = 0
        self.death: str | None = None
        self.info: wire.Ready
        self.limits: Limits
        self._step_timeout_s = step_timeout_s
        self._on_death = on_death
        self._process = EngineProcess(config, make_engine)
        self._streams: dict[int, Stream] = {}
        self._questions = Questions(self._send)
        self._pixels = SentPixels()
        self._num_requests = 0
        self._is_closing = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._hang = ""

    async def start(self) -> wire.Ready:
        """Starts the process and waits until it is ready. Raises ConfigError, UnsupportedModelError
        or WeightsError if the engine cannot be built, and EngineDeadError if its process ends
        before that."""
        ours = await self._process.start()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._frames: wire.Frames[wire.ToClient] = wire.Frames(wire.ToClient)
        first, *rest = await self._first_messages()
        if isinstance(first, wire.Failed):
            await self._end_process()
            raise getattr(errors, first.kind)(first.message)
        assert isinstance(first, wire.Ready)
        self.info = first
        self._process.is_ready.set()
        self.limits = first.limits
        for message in rest:
            self._handle(message)
        self._reading = asyncio.create_task(self._read())
        self._watching = asyncio.create_task(self._watch())
        return first

    @property
    def pid(self) -> int | None:
        """The process id of the engine."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self.death is None and not self._is_closing

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine can no longer answer."""
        if self.death is not None:
            raise EngineDeadError(self.death)
        if self._is_closing:
            raise EngineDeadError("the engine was stopped")

    def check_room(self, num_prompts: int, num_each: int) -> None:
        """Raises InvalidRequestError for more completions than are ever accepted, and
        QueueFullError for more than may run or wait now."""
        num_new = num_prompts * num_each
        if num_new > self.max_in_flight:
            raise InvalidRequestError(
                f"n={num_each}: {num_prompts} prompts with {num_each} answers each are more than "
                f"the {self.max_in_flight} that this server accepts at once"
            )
        if self.num_in_flight + num_new > self.max_in_flight:
            raise QueueFullError(
                f"{self.num_in_flight} answers are running or waiting, {num_new} more would "
                f"exceed the {self.max_in_flight} that this server accepts at once: try again later"
            )

    def add(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        keeps_steps: bool = False,
    ) -> Stream:
        """Validates prompts and queues all of them or none. Their outputs come in one stream, step
        by step if it `keeps_steps`.

        Raises EngineDeadError, QueueFullError, InvalidRequestError, and InvalidPromptError if that
        is due to a prompt; then nothing has changed.
        """
        self.check_alive()
        self.check_room(len(prompts), params.n)
        for prompt in prompts:
            validate(prompt, params, self.limits)
        numbers = range(self._num_requests, self._num_requests + len(prompts))
        self._num_requests += len(prompts)
        num_answers = params.n * len(prompts)
        stream = Stream(numbers, num_answers, self.forget, keeps_steps=keeps_steps)
        for number, prompt in zip(numbers, prompts, strict=True):
            for piece in self._pixels.before(prompt.pixels):
                self._write(piece)
            self._send(wire.Add.of(number, prompt, params, priority))
            self._streams[number] = stream
        self.num_in_flight += stream.num_answers
        return stream

    def forget(self, stream: Stream) -> None:
        """Drops a stream, and aborts those of its requests that are not over. Called by
        `Stream.close`."""
        if not [number for number in stream.numbers if self._streams.pop(number, None)]:
            return
        self.num_in_flight -= stream.num_answers
        for number in stream.open if self.death is None else ():
            self._send(wire.Abort(number))

    def fail_all(self, error: MilepostError) -> None:
        """Ends every open stream with an error."""
        for stream in dict.fromkeys(self._streams.values()):
            stream.fail(error)

    def fail_questions(self, error: MilepostError) -> None:
        """Ends every question that is not answered yet with an error."""
        self._questions.fail(error)

    async def metrics(self) -> list[Metric]:
        """Returns the engine's counters and gauges, after the current step."""
        return (await self._ask("metrics")).metrics or []

    async def state(self) -> bytes:
        """Returns the engine's state as JSON: tree, memory, the last minutes. Takes some steps."""
        return (await self._ask("state")).state or b"{}"

    async def release_cache(self) -> bool:
        """Drops everything cached and returns its memory to the system. Returns False while
        requests are running."""
        return bool((await self._ask("release_cache")).done)

    async def reset_prefix_cache(
        self, *, with_files: bool = False, timeout_s: float | None = None
    ) -> bool:
        """Drops everything cached, and with `with_files` also what is on disk. Returns False while
        requests are running. Raises RequestTimeoutError if the engine does not answer in time."""
        what: wire.Question = "reset_with_files" if with_files else "reset_prefix_cache"
        try:
            async with asyncio.timeout(timeout_s):
                return bool((await self._ask(what)).done)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the engine did not answer within {timeout_s:g} seconds"
            ) from None

    async def close(self) -> None:
        """Ends the process, whatever it is doing. Open streams raise EngineDeadError."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._reading is None or self._watching is None:
            await self._process.end_loading()
            if self._writer is not None:
                self._writer.close()
            return
        self._watching.cancel()
        if self.death is None:
            self._send(wire.Stop())
        await self._end_process()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._fail_everything(EngineDeadError("the engine was stopped"))

    # --- inside -----------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        self._write(wire.frame(message))

    def _write(self, data: bytes) -> None:
        assert self._writer is not None, "the engine has been started"
        if not self._writer.is_closing():  # else `_die` will fail whatever waits for an answer
            self._writer.write(data)

    async def _ask(self, what: wire.Question) -> wire.Reply:
        self.check_alive()
        return await self._questions.ask(what)

    async def _first_messages(self) -> list[wire.ToClient]:
        while data := await self._reader.read(READ_BYTES):
            messages = self._frames.feed(data)
            if messages:
                return messages
        await self._end_process()
        raise EngineDeadError(f"the engine process ended while it started: {self._process.ending}")

    async def _read(self) -> None:
        """Dispatches messages until the process ends."""
        reason = ""
        try:
            while data := await self._reader.read(READ_BYTES):
                self._questions.note_life()
                for message in self._frames.feed(data):
                    if isinstance(message, wire.Failed):
                        reason = message.message
                    self._handle(message)
        except ConnectionError:
            pass  # the exit code says more
        except ValueError as error:
            reason = f"the engine process sent what is no message: {error}"
            self._process.kill()
        if not self._is_closing:
            await self._die(self._hang or reason)

    async def _watch(self) -> None:
        """Kills an engine whose step does not end."""
        limit = self._step_timeout_s
        if limit is None:
            return
        await self._questions.until_silent_for(limit)
        self._hang = f"the engine gave no sign of life for {limit:g} seconds and was killed"
        self._process.kill()

    async def _die(self, reason: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._process.join()
        self.death = reason or f"the engine process ended: {self._process.ending}"
        logger.error("%s", self.death)
        self._fail_everything(EngineDeadError(self.death))
        self._on_death(self.death)

    def _handle(self, message: wire.ToClient) -> None:
        match message:
            case wire.Outputs():
                for output in message.outputs:
                    stream = self._streams.get(output.number)
                    if stream is not None:
                        stream.put(output)
            case wire.Refused():
                stream = self._streams.get(message.number)
                if stream is not None:
                    stream.fail(message.error)
            case wire.Reply():
                self._questions.answer(message)

    def _fail_everything(self, error: EngineDeadError) -> None:
        self.fail_all(error)
        self.fail_questions(error)

    async def _end_process(self) -> None:
        await self._process.end()
        if self._writer is not None:
            self._writer.close()
