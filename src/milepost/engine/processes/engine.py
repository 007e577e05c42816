"""The engine in a process of its own: messages in from a socket, steps, messages out.

Single-threaded. Between two steps it handles whatever has arrived, so an abort frees a request's
memory before the next step is planned. It knows nothing of HTTP. It ends when it is told to, when a
step fails, or when the client goes away: then at once, even while it loads. The client handles
Ctrl-C, SIGTERM and SIGHUP, since it may want to finish answers first.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import time
from collections.abc import Callable

from msgspec import structs

from milepost.config import EngineConfig
from milepost.engine import heap
from milepost.engine.constraints import CompiledForm
from milepost.engine.ending import end_with_parent
from milepost.engine.facts import watcher_of
from milepost.engine.loop import Engine, RequestGroup
from milepost.engine.processes.compiling import Compiling
from milepost.engine.processes.pixels import ReceivedPixels
from milepost.engine.processes.wire import (
    Abort,
    Add,
    Ask,
    Failed,
    Frames,
    Outputs,
    Ready,
    Refused,
    Reply,
    SamePixels,
    Stop,
    ToEngine,
    frame,
)
from milepost.errors import EngineDeadError, InvalidRequestError, MilepostError, QueueWaitError
from milepost.runner.recording import PictureRecord

logger = logging.getLogger(__name__)

READ_BYTES = 2**18
MOST_BYTES = 2**22
"""Number of bytes that are read between two steps while requests run."""
REST_S = 1.0
"""Seconds after its last step until the engine counts as idle."""
TEND_S = 0.002
"""Seconds between two checks of copies that are made while nothing runs."""
TRIM_S = 60.0
"""Interval at which an engine that is never idle returns free memory between two steps, which takes
some milliseconds."""


class Loop:
    """Joins one engine with one socket."""

    def __init__(self, engine: Engine, sock: socket.socket) -> None:
        self._engine = engine
        self._socket = sock
        self._frames: Frames[ToEngine | PictureRecord] = Frames(ToEngine)
        self._pixels = ReceivedPixels()
        self._groups: dict[int, RequestGroup] = {}
        self._queued: dict[int, RequestGroup] = {}
        """Groups that are not admitted yet."""
        self._compiling = Compiling(engine)
        self._watch = watcher_of(engine.scheduler, engine.facts)
        self._lookers: list[int] = []
        """Ids of the questions that the survey in progress will answer."""
        self._is_open = True
        self._has_rested = True
        self._trimmed_at: float | None = None

    def run(self) -> None:
        """Serves until Stop, or until the client is gone. Raises EngineDeadError."""
        while self._is_open:
            is_idle = not self._engine.has_work or self._engine.awaits_others
            if is_idle and not self._has_rested and not self._watch.is_looking:
                self._rest()
            timeout = self._engine.rest_s if is_idle and not self._watch.is_looking else 0
            if is_idle and self._engine.do_idle_work():
                timeout = TEND_S
            self._receive(timeout)
            while self._is_open and (spare_s := self._engine.spare_s):
                self._receive(spare_s)
            if self._is_open and self._engine.has_work and not self._engine.awaits_others:
                self._step()
            self._look()

    def close(self) -> None:
        """Frees what `run` needed."""
        self._compiling.close()

    @property
    def _sources(self) -> list[socket.socket]:
        return [self._socket, self._compiling.done, *self._engine.wakers]

    def _rest(self) -> None:
        """Returns free memory to the system, unless something arrives soon."""
        self._watch.note_rest(time.monotonic())
        if not select.select(self._sources, [], [], REST_S)[0]:
            heap.give_back()
            self._has_rested = True

    def _receive(self, timeout: float | None) -> None:
        """Handles what has arrived, or what arrives within `timeout` seconds; None for no limit.
        Running requests do not wait for the pixels of large pictures to arrive."""
        num_bytes = 0
        while self._is_open and (ready := select.select(self._sources, [], [], timeout)[0]):
            if self._compiling.done in ready:
                for add, form, problem in self._compiling.take():
                    self._add(add, form, problem)
            if any(waker in ready for waker in self._engine.wakers):
                self._engine.handle_wakers(ready)
            if self._socket in ready:
                num_bytes += self._read()
            if num_bytes >= MOST_BYTES and self._engine.has_work:
                return
            timeout = 0

    def _read(self) -> int:
        """Reads and handles a piece of the input. Returns its number of bytes."""
        data = self._socket.recv(READ_BYTES)
        if not data:
            self._is_open = False
        for message in self._frames.feed(data):
            self._handle(message)
        return len(data)

    def _handle(self, message: ToEngine | PictureRecord) -> None:
        match message:
            case PictureRecord() | SamePixels():
                self._pixels.take(message)
            case Add():
                self._begin(structs.replace(message, pixels=self._pixels.of_request()))
            case Abort():
                self._abort(message.number)
                self._watch.note_time(time.monotonic())
            case Ask(what="state"):
                self._lookers.append(message.id)
                self._watch.look()
            case Ask():
                self.send(self._answer(message))
            case Stop():
                self._is_open = False

    def _begin(self, message: Add) -> None:
        if message.params.takes_preparing:
            self._compiling.begin(message)
        else:
            self._add(message)

    def _add(self, message: Add, form: CompiledForm | None = None, problem: str = "") -> None:
        try:
            if problem:
                raise InvalidRequestError(problem)
            group = self._engine.queue(
                message.prompt,
                message.params,
                number=message.number,
                priority=message.priority,
                form=form,
            )
        except (InvalidRequestError, QueueWaitError) as error:
            self._refuse(message.number, error)
            return
        self._groups[group.number] = self._queued[group.number] = group

    def _refuse(self, number: int, error: InvalidRequestError | QueueWaitError) -> None:
        late_s = error.retry_after_s if isinstance(error, QueueWaitError) else None
        self.send(Refused(number=number, message=str(error), retry_after_s=late_s))

    def _abort(self, number: int) -> None:
        self._compiling.forget(number)
        group = self._groups.get(number)
        if group is not None:
            self._engine.abort(group)
            self._forget(group)

    def _answer(self, ask: Ask) -> Reply:
        if ask.what == "reset_prefix_cache":
            return Reply(id=ask.id, done=self._engine.reset_prefix_cache())
        if ask.what == "reset_with_files":
            return Reply(id=ask.id, done=self._engine.reset_prefix_cache(reset_connector=True))
        if ask.what == "release_cache":
            done = self._engine.release_cache()
            heap.give_back()
            return Reply(id=ask.id, done=done)
        if ask.what == "metrics":
            return Reply(id=ask.id, metrics=self._engine.get_metrics())
        assert ask.what == "alive", f"no such question: {ask.what!r}"
        return Reply(id=ask.id)

    def _look(self) -> None:
        """Continues the survey in progress, and sends the answer once it is complete."""
        state = self._watch.go_on(time.monotonic)
        if state is not None:
            lookers, self._lookers = self._lookers, []
            for id_ in lookers:
                self.send(Reply(id=id_, state=state))

    def _step(self) -> None:
        start = time.monotonic()
        self._watch.note_time(start)
        self._has_rested = False
        groups = self._engine.step()
        num_ended = sum(len(group.completions) for group in groups if group.is_finished)
        self._watch.note_step(time.monotonic(), num_ended)
        self._note_admissions(start)
        for group, error in self._engine.end_late():
            self._forget(group)
            self._refuse(group.number, error)
        outputs = [group.take_output() for group in groups]
        for group, output in zip(groups, outputs, strict=True):
            if output.finished:
                self._forget(group)
        if outputs:
            self.send(Outputs(outputs))
        self._trim(start)

    def _trim(self, now: float) -> None:
        """Returns memory to the system, if the last time was long ago."""
        if self._trimmed_at is None:
            self._trimmed_at = now
        elif now - self._trimmed_at >= TRIM_S:
            heap.give_back()
            self._trimmed_at = now

    def _note_admissions(self, now: float) -> None:
        queued = self._queued.values()
        for group in queued:
            if group.loading_since is None and group.completions[0].request.is_loading:
                group.loading_since = now
        for group in [one for one in queued if one.completions[0].request.report is not None]:
            group.admitted_at = now
            self._watch.note_admission(group.completions[0].request, now)
            del self._queued[group.number]

    def _forget(self, group: RequestGroup) -> None:
        del self._groups[group.number]
        self._queued.pop(group.number, None)

    def send(self, message: object) -> None:
        """Sends a message to the client. If the client is gone, the loop ends."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self._is_open = False


def main(config: EngineConfig, sock: socket.socket, make_engine: Callable[..., Engine]) -> None:
    """Runs the process: builds the engine, reports the outcome, and serves. Exit status 1 after a
    failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with_parent(sock.fileno())
    heap.bound_plans()
    with sock:
        try:
            engine = make_engine(config)
        except MilepostError as error:
            sock.sendall(frame(Failed.of(error)))
            raise SystemExit(1) from None
        heap.settle()
        sock.sendall(frame(_ready(engine)))
        loop = Loop(engine, sock)
        try:
            loop.run()
        except EngineDeadError as error:
            logger.exception("the step loop failed")
            loop.send(Failed.of(error))
            raise SystemExit(1) from None
        finally:
            loop.close()
            engine.close()


def _ready(engine: Engine) -> Ready:
    cache = engine.scheduler.outside.cache
    return Ready(
        model=engine.config.model or "milepost-tiny",
        limits=engine.limits,
        page_size=cache.page_size,
        num_pages=cache.pages.capacity,
        num_slots=cache.slots.capacity,
        sampling_defaults=dict(engine.sampling_defaults),
        facts=engine.facts,
        images=engine.images,
        identity=cache.identity,
    )
