"""The other end of the engine process: starts it, and turns its messages into async streams.

Everything here runs in one event loop. When the engine dies, each open stream, and each question,
raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from milepost import errors
from milepost.config import EngineConfig
from milepost.engine.metrics import Metric
from milepost.engine.parent import without_interrupts
from milepost.engine.processes.stream import Stream
from milepost.engine.processes.wire import (
    Abort,
    Add,
    Ask,
    Died,
    Failed,
    Frames,
    Outputs,
    Question,
    Ready,
    Refused,
    Reply,
    Stop,
    ToClient,
    frame,
)
from milepost.engine.prompts import Prompt
from milepost.engine.validation import Limits, validate
from milepost.errors import (
    EngineDeadError,
    InvalidRequestError,
    MilepostError,
    QueueFullError,
    QueueWaitError,
    RequestTimeoutError,
)
from milepost.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

CONTEXT: BaseContext = multiprocessing.get_context("spawn")
"""How engines are started: a fork would inherit threads, and what CUDA has set up."""
READ_BYTES = 2**18
STOP_S = 5.0
"""How long the process may take to end before it is killed."""
WATCHES = 4
"""So many times in `step_timeout_s` the engine is asked for a sign of life."""


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
        self.info: Ready
        self.limits: Limits
        self._step_timeout_s = step_timeout_s
        self._on_death = on_death
        self._make_engine = make_engine
        self._streams: dict[int, Stream] = {}
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._num_requests = self._num_questions = 0
        self._is_closing = False
        self._process: Any = None
        self._starting: asyncio.Future[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._has_heard = False
        self._hang = ""

    async def start(self) -> Ready:
        """Start the process and wait until it is ready.

        Raises ConfigError, UnsupportedModelError or WeightsError if the engine cannot be built, and
        EngineDeadError if its process ends before it has said so.
        """
        ours, theirs = socket.socketpair()
        arguments = (self.config, theirs, self._make_engine)
        self._process = CONTEXT.Process(target=_run_engine, args=arguments, name="engine")
        self._starting = asyncio.ensure_future(asyncio.to_thread(_start, self._process))
        await asyncio.shield(self._starting)
        theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._frames: Frames[ToClient] = Frames(ToClient)
        first, *rest = await self._first_messages()
        if isinstance(first, Failed):
            await self._end_process()
            raise getattr(errors, first.kind)(first.message)
        assert isinstance(first, Ready)
        self.info = first
        self.limits = Limits.of(
            self.config,
            vocab_size=first.vocab_size,
            max_model_len=first.max_model_len,
            closes_reasoning=first.closes_reasoning,
        )
        self._handle_all(rest)
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

    def check_room(self, num_prompts: int, num_each: int) -> None:
        """Raises InvalidRequestError for more completions than are ever accepted, and
        QueueFullError for more than may be running or waiting now."""
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
        self._check_alive()
        self.check_room(len(prompts), params.n)
        for prompt in prompts:
            validate(prompt, params, self.limits)
        numbers = range(self._num_requests, self._num_requests + len(prompts))
        self._num_requests += len(prompts)
        stream = Stream(numbers, params.n * len(prompts), self, keeps_steps=keeps_steps)
        for number, prompt in zip(numbers, prompts, strict=True):
            self._send(Add.of(number, prompt, params, priority))
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
            self._send(Abort(number))

    def fail_all(self, error: MilepostError) -> None:
        """Ends every open stream with an error."""
        for stream in dict.fromkeys(self._streams.values()):
            stream.fail(error)

    def fail_questions(self, error: MilepostError) -> None:
        """End every question that is not answered yet with an error."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)

    async def metrics(self) -> list[Metric]:
        """The engine's counters and gauges. Waits for the step under way."""
        return (await self._ask("metrics")).metrics or []

    async def state(self) -> bytes:
        """What there is to see of the engine, as JSON: the tree, the memory, the last minutes.
        Takes some steps.
        """
        return (await self._ask("state")).state or b"{}"

    async def release_cache(self) -> bool:
        """Forget everything cached and return its memory; False while requests are running."""
        return bool((await self._ask("release_cache")).done)

    async def reset_prefix_cache(self, timeout_s: float | None = None) -> bool:
        """Forget everything cached; False while requests are running.

        Raises RequestTimeoutError if the engine does not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return bool((await self._ask("reset_prefix_cache")).done)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the engine did not answer within {timeout_s:g} seconds"
            ) from None

    async def close(self) -> None:
        """End the process, whatever it is doing; open streams raise EngineDeadError."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._reading is None or self._watching is None:
            await self._end_loading()
            return
        self._watching.cancel()
        if self.death is None:
            self._send(Stop())
        await self._end_process()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._fail_everything(EngineDeadError("the engine was stopped"))

    # --- inside -----------------------------------------------------------------------------------

    def _next_question(self) -> int:
        self._num_questions += 1
        return self._num_questions

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)
        if self._is_closing:
            raise EngineDeadError("the engine was stopped")

    def _send(self, message: object) -> None:
        assert self._writer is not None, "the engine has been started"
        data = frame(message)
        if not self._writer.is_closing():  # else `_die` will fail whatever waits for an answer
            self._writer.write(data)

    async def _ask(self, what: Question) -> Reply:
        self._check_alive()
        id_ = self._next_question()
        future = self._asked[id_] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(id=id_, what=what))
            return await future
        finally:
            self._asked.pop(id_, None)

    async def _first_messages(self) -> list[ToClient]:
        while data := await self._reader.read(READ_BYTES):
            messages = self._frames.feed(data)
            if messages:
                return messages
        await self._end_process()
        raise EngineDeadError(
            f"the engine process ended while it started: {_ending(self._process.exitcode)}"
        )

    async def _read(self) -> None:
        """Hand out messages until the process ends."""
        reason = ""
        try:
            while data := await self._reader.read(READ_BYTES):
                self._has_heard = True
                for message in self._frames.feed(data):
                    if isinstance(message, Died):
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
        """Kill an engine whose step does not end.

        Questions are answered between steps. Silence is counted in whole waits: time in which this
        process slept as well is no sign of a hang.
        """
        limit, num_silent = self._step_timeout_s, 0
        if limit is None:
            return
        while num_silent < WATCHES:
            self._has_heard = False
            self._send(Ask(id=self._next_question(), what="alive"))
            await asyncio.sleep(limit / WATCHES)
            num_silent = 0 if self._has_heard else num_silent + 1
        self._hang = f"the engine gave no sign of life for {limit:g} seconds and was killed"
        self._process.kill()

    async def _die(self, reason: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.to_thread(self._process.join, STOP_S)
        self.death = reason or f"the engine process ended: {_ending(self._process.exitcode)}"
        logger.error("%s", self.death)
        self._fail_everything(EngineDeadError(self.death))
        self._on_death(self.death)

    def _handle_all(self, messages: list[ToClient]) -> None:
        for message in messages:
            self._handle(message)

    def _handle(self, message: ToClient) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    stream = self._streams.get(output.number)
                    if stream is not None:
                        stream.put(output)
            case Refused():
                stream = self._streams.get(message.number)
                if stream is not None:
                    stream.fail(_refusal(message))
            case Reply():
                future = self._asked.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)

    def _fail_everything(self, error: EngineDeadError) -> None:
        self.fail_all(error)
        self.fail_questions(error)

    async def _end_loading(self) -> None:
        """End a process that was never ready: it would first load the weights to their end."""
        if self._starting is not None:
            await self._starting
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            await self._end_process()

    async def _end_process(self) -> None:
        await asyncio.to_thread(self._process.join, STOP_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        if self._writer is not None:
            self._writer.close()


def _refusal(message: Refused) -> MilepostError:
    if message.retry_after_s is None:
        return InvalidRequestError(message.message)
    return QueueWaitError(message.message, retry_after_s=message.retry_after_s)


def _start(process: BaseProcess) -> None:
    resource_tracker.ensure_running()  # its own start lets interrupts through again
    with without_interrupts():
        process.start()


def _run_engine(
    config: EngineConfig, sock: socket.socket, make_engine: Callable[..., Any] | None
) -> None:
    """In the new process: only there torch is imported, and all that an engine needs."""
    from milepost.engine.processes import engine as process

    process.main(config, sock, make_engine or process.Engine)


def _ending(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None:
        return "its connection closed"
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by signal {-exit_code}"
