"""The engine in a process of its own: messages in from a socket, steps, messages out.

Single-threaded. Between two steps it takes whatever has arrived, so an abort frees what a request
held before the next step is planned. It knows nothing of HTTP. It ends when it is told to, when a
step fails, or when the client goes away: at once then, even while it loads. Ctrl-C and SIGTERM are
the client's to handle, who may want to finish answers first.
"""

from __future__ import annotations

import logging
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from milepost.config import EngineConfig
from milepost.engine import heap
from milepost.engine.core import Engine
from milepost.engine.grammars import Form
from milepost.engine.parent import end_with_parent
from milepost.engine.requests import Answer, Job
from milepost.engine.watch import Watch
from milepost.engine.wire import (
    Abort,
    Add,
    Ask,
    Delta,
    Died,
    Failed,
    Frames,
    Output,
    Outputs,
    Ready,
    Refused,
    Reply,
    Report,
    Stop,
    ToEngine,
    frame,
)
from milepost.errors import EngineDeadError, InvalidRequestError, MilepostError

logger = logging.getLogger(__name__)

READ_BYTES = 2**18
REST_S = 1.0
"""So long after its last step the engine counts as idle."""
TEND_S = 0.002
"""Between two looks at copies that are made while nothing runs."""
TRIM_S = 60.0
"""An engine that never rests gives free memory back so often, between two steps: it takes some
milliseconds."""


@dataclass(slots=True, eq=False)
class _Sent:
    """How much of one answer the client has."""

    answer: Answer
    num_tokens: int = 0
    num_logprobs: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_over: bool = False

    def delta(self) -> Delta | None:
        """What the answer gained since the last call; None for nothing."""
        request = self.answer.request
        if self.is_over:
            return None
        tokens = request.chain.tokens[request.num_prompt_tokens + self.num_tokens :].tolist()
        reason = request.finish_reason
        if not tokens and reason is None:
            return None
        answer = self.answer
        num_drafts = answer.num_draft_tokens - self.num_draft_tokens
        num_accepted = answer.num_accepted_tokens - self.num_accepted_tokens
        self.num_tokens += len(tokens)
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.is_over = reason is not None
        return Delta(
            index=self.answer.index,
            text=self.answer.text.delta(),
            token_ids=tokens,
            logprobs=None if self.answer.logprobs is None else self._logprobs(),
            finish_reason=reason.value if reason is not None else None,
            stop_reason=self.answer.stop_reason,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=num_accepted,
        )

    def _logprobs(self) -> list:
        known = self.answer.logprobs or []
        new = known[self.num_logprobs :]
        self.num_logprobs = len(known)
        return new


@dataclass(slots=True, eq=False)
class _Task:
    """A request of the client."""

    id: int
    job: Job
    sent: list[_Sent] = field(default_factory=list)
    admitted_at: float | None = None
    has_report: bool = False
    has_scores: bool = False

    def output(self) -> Output:
        deltas = [delta for sent in self.sent if (delta := sent.delta()) is not None]
        report = None if self.has_report else self._report()
        self.has_report = self.has_report or report is not None
        first, scores = self.job.answers[0], None
        if not self.has_scores and first.request.num_output_tokens:
            scores, self.has_scores = first.prompt_logprobs, True
        return Output(
            id=self.id,
            deltas=deltas,
            finished=any(delta.finish_reason for delta in deltas) and self.job.is_finished,
            report=report,
            prompt_logprobs=scores,
            kv_transfer_params=self.job.kv_transfer_params,
        )

    def _report(self) -> Report | None:
        report = self.job.answers[0].request.report
        if report is None:
            return None
        return Report(
            prompt_tokens=report.prompt_tokens,
            kv_length=report.kv_length,
            state_length=report.state_length,
            reused=report.reused,
            lost={reason.value: count for reason, count in report.lost.items()},
            admitted_at=self.admitted_at or time.monotonic(),
            loaded=report.loaded,
        )


class _Compiling:
    """Compiles forms in a thread, one after the other; `done` can be read when something is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted: queue.SimpleQueue[Add | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[Add, Form | None, str]] = queue.SimpleQueue()
        self.done, self._bell = socket.socketpair()
        self._pending: set[int] = set()
        self._thread: threading.Thread | None = None

    def begin(self, message: Add) -> None:
        """The first form starts the thread, which nobody waits for at the end."""
        self._pending.add(message.id)
        self._wanted.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="forms", daemon=True)
            self._thread.start()

    def forget(self, id_: int) -> None:
        self._pending.discard(id_)

    def close(self) -> None:
        """Nobody reads on. A form that is being compiled is left to its thread, which ends with
        the process.
        """
        self.done.close()
        if self._thread is None:
            self._bell.close()

    def take(self) -> list[tuple[Add, Form | None, str]]:
        """What has become of the requests: the form, or what is wrong with it."""
        self.done.recv(READ_BYTES)
        found = []
        while not self._made.empty():
            made = self._made.get()
            if made[0].id in self._pending:
                self._pending.discard(made[0].id)
                found.append(made)
        return found

    def _run(self) -> None:
        while (message := self._wanted.get()) is not None:
            form, problem = None, ""
            if message.id in self._pending:
                try:
                    form = self._engine.form_of(message.params)
                except BaseException as error:  # noqa: BLE001 - a panic in llguidance is one too
                    problem = str(error) or repr(error)
            self._made.put((message, form, problem))
            self._bell.send(b".")


class Loop:
    """Joins one engine with one socket."""

    def __init__(self, engine: Engine, sock: socket.socket) -> None:
        self._engine = engine
        self._socket = sock
        self._frames: Frames[ToEngine] = Frames(ToEngine)
        self._tasks: dict[int, _Task] = {}
        self._by_job: dict[Job, _Task] = {}
        self._queued: dict[int, _Task] = {}
        self._compiling = _Compiling(engine)
        self._watch = Watch(engine.scheduler, engine.facts)
        self._lookers: list[int] = []
        """Ids of questions that the look under way answers."""
        self._is_open = True
        self._has_rested = True
        self._trimmed_at: float | None = None

    def run(self) -> None:
        """Serve until Stop, or until the client is gone. Raises EngineDeadError."""
        while self._is_open:
            is_idle = not self._engine.has_work or self._engine.awaits_others
            if is_idle and not self._has_rested and not self._watch.is_looking:
                self._rest()
            timeout = None if is_idle and not self._watch.is_looking else 0
            if is_idle and self._engine.tend():
                timeout = TEND_S
            self._receive(timeout)
            if self._is_open and self._engine.has_work and not self._engine.awaits_others:
                self._step()
            self._look()

    def close(self) -> None:
        """Free what `run` needs, when it is over."""
        self._compiling.close()

    @property
    def _sources(self) -> list[socket.socket]:
        bell = self._engine.bell
        return [self._socket, self._compiling.done, *([bell.socket] if bell else [])]

    def _rest(self) -> None:
        """Give memory back, unless something comes soon."""
        self._watch.note_time(time.monotonic())
        if not select.select(self._sources, [], [], REST_S)[0]:
            heap.give_back()
            self._has_rested = True

    def _receive(self, timeout: float | None) -> None:
        """Handle what has arrived, or what comes within so many seconds; None: whenever."""
        while self._is_open and (ready := select.select(self._sources, [], [], timeout)[0]):
            if self._compiling.done in ready:
                for add, form, problem in self._compiling.take():
                    self._add(add, form, problem)
            if self._engine.bell is not None and self._engine.bell.socket in ready:
                self._engine.hear()
            if self._socket in ready:
                self._read()
            timeout = 0

    def _read(self) -> None:
        data = self._socket.recv(READ_BYTES)
        if not data:
            self._is_open = False
        for message in self._frames.feed(data):
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add() if message.params.structured_outputs is not None:
                self._compiling.begin(message)
            case Add():
                self._add(message)
            case Abort():
                self._abort(message.id)
            case Ask(what="state"):
                self._lookers.append(message.id)
                self._watch.look()
            case Ask():
                self.send(self._answer(message))
            case Stop():
                self._is_open = False

    def _add(self, message: Add, form: Form | None = None, problem: str = "") -> None:
        try:
            if problem:
                raise InvalidRequestError(problem)
            job = self._engine.add(
                message.prompt, message.params, priority=message.priority, form=form
            )
        except InvalidRequestError as error:
            self.send(Refused(id=message.id, message=str(error)))
            return
        task = _Task(message.id, job, [_Sent(answer) for answer in job.answers])
        self._tasks[message.id] = self._queued[message.id] = task
        self._by_job[job] = task

    def _abort(self, id_: int) -> None:
        self._compiling.forget(id_)
        task = self._tasks.get(id_)
        if task is not None:
            self._engine.abort(task.job)
            self._forget(task)

    def _answer(self, ask: Ask) -> Reply:
        if ask.what == "reset_prefix_cache":
            return Reply(id=ask.id, done=self._engine.reset_prefix_cache())
        if ask.what == "release_cache":
            done = self._engine.release_cache()
            heap.give_back()
            return Reply(id=ask.id, done=done)
        if ask.what == "metrics":
            return Reply(id=ask.id, metrics=self._engine.get_metrics())
        assert ask.what == "alive", f"no such question: {ask.what!r}"
        return Reply(id=ask.id)

    def _look(self) -> None:
        """Some of the look under way, if there is one, and its answer when it is whole."""
        state = self._watch.go_on(time.monotonic)
        if state is not None:
            lookers, self._lookers = self._lookers, []
            for id_ in lookers:
                self.send(Reply(id=id_, state=state))

    def _step(self) -> None:
        start = time.monotonic()
        self._watch.note_time(start)
        self._has_rested = False
        jobs = self._engine.step()
        self._note_admissions(start)
        tasks = [self._by_job[job] for job in jobs]
        outputs = [task.output() for task in tasks]
        for task, output in zip(tasks, outputs, strict=True):
            if output.finished:
                self._forget(task)
        if outputs:
            self.send(Outputs(outputs))
        self._trim(start)

    def _trim(self, now: float) -> None:
        """Give memory back, if the last time was long ago."""
        if self._trimmed_at is None:
            self._trimmed_at = now
        elif now - self._trimmed_at >= TRIM_S:
            heap.give_back()
            self._trimmed_at = now

    def _note_admissions(self, now: float) -> None:
        admitted = [
            task for task in self._queued.values() if task.job.answers[0].request.report is not None
        ]
        for task in admitted:
            task.admitted_at = now
            self._watch.note_admission(task.job.answers[0].request, now)
            del self._queued[task.id]

    def _forget(self, task: _Task) -> None:
        del self._tasks[task.id], self._by_job[task.job]
        self._queued.pop(task.id, None)

    def send(self, message: object) -> None:
        """To the client; one that has gone ends the loop."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            self._is_open = False


def main(config: EngineConfig, sock: socket.socket, make_engine: Callable) -> None:
    """The process: build the engine, say how that went, serve. Exit status 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(sock.fileno())
    heap.bound_plans()
    with sock:
        try:
            engine = make_engine(config)
        except MilepostError as error:
            sock.sendall(frame(Failed(kind=type(error).__name__, message=str(error))))
            raise SystemExit(1) from None
        heap.settle()
        sock.sendall(frame(_ready(engine)))
        loop = Loop(engine, sock)
        try:
            loop.run()
        except EngineDeadError as error:
            logger.exception("the step loop failed")
            loop.send(Died(message=str(error)))
            raise SystemExit(1) from None
        finally:
            loop.close()
            engine.close()


def _ready(engine: Engine) -> Ready:
    cache = engine.scheduler.cache
    return Ready(
        model=engine.config.model or "milepost-tiny",
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        page_size=cache.page_size,
        num_pages=cache.pages.capacity,
        num_slots=cache.slots.pool.capacity,
        sampling_defaults=dict(engine.sampling_defaults),
        facts=engine.facts,
        identity=cache.identity,
    )
