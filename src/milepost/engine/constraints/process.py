"""Tries out forms in a process of its own, which is killed when one takes too long.

The process (`main`) compiles a form as an engine would, and makes the first masks. It answers with
what is wrong, if anything. The engine compiles again what has passed, so anything slow there would
have been slow here first. Messages are JSON. The process ends when its input does (`child`), or by
an alarm of its own.

`FormChecks` is the other side, in an event loop: it starts the process, keeps verdicts, and
restarts a process that does not answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections import OrderedDict
from dataclasses import asdict, fields
from typing import Any

from milepost.engine.child import Child, answer, bound_memory, messages
from milepost.engine.constraints.grammars import Compiler, Vocabulary, grammar_of, problem_of
from milepost.errors import ConfigError, InvalidRequestError
from milepost.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)

MAX_VERDICTS = 1024
MAX_BYTES = 2 * 2**30
"""Bytes that the process may allocate, besides what it starts with."""
MAX_MASK_S = 0.05
"""Processor time of one token's mask; the limits of `grammars` keep most far below."""
_PATIENCE = 4.0
"""Factor by which a form may take longer than its processor time, on a busy machine."""


class FormChecks:
    """Checks forms for a server. `await start()` before anything else, `close` at the end."""

    def __init__(
        self, vocabulary: Vocabulary | None, *, timeout_s: float, problem: str = ""
    ) -> None:
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._child = Child("milepost.engine.constraints")
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[str, str] = OrderedDict()
        self.problem = problem
        """The reason for which the engine supports no constraints at all; empty if it does."""
        self._trials: dict[str, _Trial] = {}

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def start(self) -> None:
        """Starts the process, and sets `problem` if the tokenizer cannot be used. A process that
        ends at once is started again for the next form."""
        if self._vocabulary is None:
            self.problem = self.problem or "this server has no tokenizer (--skip-tokenizer-init)"
            return
        await self._child.start()
        about = {**asdict(self._vocabulary), "timeout_s": self._timeout_s}
        first, status = await self._ask(about, None)
        if first is None:  # for want of memory, say: the next form tries again
            logger.error("no structured outputs so far: their process ended, status %s", status)
            return
        self.problem = first
        if self.problem:
            logger.warning("no structured outputs: %s", self.problem)

    async def check(self, wanted: StructuredOutputs) -> None:
        """Raises InvalidRequestError, naming the form's field, for a form that cannot be enforced
        within the bounds. Forms are tried one after the other. A form is dropped from the queue
        when all callers that wait for it are cancelled."""
        text = _encoded(wanted)
        verdict = self._verdicts.get(text)
        if verdict is None:
            trial = self._trials.get(text)
            if trial is None:
                trial = self._trials[text] = _Trial(asyncio.ensure_future(self._judge(text)))
            try:
                verdict = await trial.outcome()
            finally:
                if not trial.num_waiting and self._trials.get(text) is trial:
                    del self._trials[text]  # who comes now is not to share what was given up
        else:
            self._verdicts.move_to_end(text)
        if verdict:
            raise InvalidRequestError(f"{wanted.field}: {verdict}")

    async def _judge(self, text: str) -> str:
        """Returns an error message for a form; empty if it can be enforced."""
        async with self._turn:
            verdict, is_sure = await self._tried(text)
        if is_sure:
            self._verdicts[text] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    async def _tried(self, text: str) -> tuple[str, bool]:
        """Returns an error message for a form, empty if it can be enforced, and whether the
        verdict is final."""
        if self._child.pid is None and not self.problem:
            await self.start()
        if self.problem:
            return self.problem, False
        if self._child.pid is None:
            return "the process that compiles it did not start", False
        try:
            verdict, status = await self._ask(json.loads(text), self._timeout_s * _PATIENCE)
        except TimeoutError:
            return f"its check did not end within {self._timeout_s * _PATIENCE:g} seconds", False
        if verdict is not None:
            return verdict, True
        if status == -signal.SIGPROF:
            bound = f"{self._timeout_s:g} seconds (--grammar-timeout-s)"
        else:
            bound = f"{MAX_BYTES >> 20} MiB"
        return f"too complex: it takes more than {bound} to compile", True

    async def _ask(self, message: Any, timeout_s: float | None) -> tuple[str | None, int]:
        """Returns the answer, or None and the exit status if the process ends first. Raises
        TimeoutError."""
        found, status = await self._child.ask(json.dumps(message).encode(), timeout_s)
        return (None if found is None else json.loads(found)), status

    async def close(self) -> None:
        """Ends the process."""
        await self._child.close()


class _Trial:
    """A form being tried or queued, with the number of callers that wait for the outcome."""

    def __init__(self, task: asyncio.Future[str]) -> None:
        self._task = task
        self.num_waiting = 0

    async def outcome(self) -> str:
        self.num_waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self._task.cancel()


def _encoded(wanted: StructuredOutputs) -> str:
    """Returns a constraint as JSON, without its start and field, which do not change the verdict.
    Raises InvalidRequestError."""
    form = {f.name: getattr(wanted, f.name) for f in fields(wanted)}
    del form["starts_after"], form["field"]
    try:
        return json.dumps(form)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{wanted.field}: {error}") from error


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Reads the tokenizer, then tries one form after the other."""
    forms = messages()
    start = json.loads(next(forms))
    timeout_s = start.pop("timeout_s")
    try:
        compiler = Compiler(Vocabulary(**start))
    except ConfigError as error:
        _say(str(error))
        return
    bound_memory(MAX_BYTES)
    _say("")
    for form in forms:
        # Both end the process; the second one where nobody is left to do so.
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, 2 * _PATIENCE * timeout_s)
        _say(_problem(compiler, StructuredOutputs(**json.loads(form), field="")))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _say(text: str) -> None:
    answer(json.dumps(text).encode())


def _problem(compiler: Compiler, wanted: StructuredOutputs) -> str:
    """Compiles a form and makes its first masks. Returns what is wrong with it."""
    try:
        matcher = compiler.compile(grammar_of(wanted))
    except (InvalidRequestError, ValueError) as error:
        return str(error).removeprefix(": ")
    start = time.process_time()
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    spent_s = time.process_time() - start
    if not matcher.is_error() and mask:
        lowest = (mask & -mask).bit_length() - 1
        matcher.consume_token(lowest)  # rows are counted once they are passed
    problem = problem_of(matcher)
    if problem is None and spent_s > MAX_MASK_S:
        problem = (
            f"too complex: which tokens may begin it takes {spent_s * 1000:.0f} ms to find, of "
            f"{MAX_MASK_S * 1000:.0f}"
        )
    return problem or ""
