"""Logs to standard error: lines of text, or one JSON object a line.

The command line sets them up (`set_up`), and the processes that a server starts do the same
(`current` in one, `set_up` in the other). Nothing else configures logging. A line of JSON has time,
level, logger, process and message, the ids of the request that it belongs to, and the traceback of
an exception. With JSON whatever else Python code writes to standard error becomes such lines too
(`StrayText`); only what libraries in C write there stays as it is.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ACCESS, _STATS, START = "milepost.access", "milepost.stats", "milepost.start"
"""Loggers whose lines are always written: they have switches of their own. `START` is for JSON
alone, since its lines are printed otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSetup:
    """Log settings of a process."""

    format: LogFormat = "text"
    is_detailed: bool = False
    """Whether the engine's actions are logged, and not only warnings and errors."""
    process: str = "server"
    """Name of the process in lines of JSON."""

    def words(self) -> list[str]:
        """Returns the setup as words of a command line."""
        return [self.format, "detailed" if self.is_detailed else "brief", self.process]

    @staticmethod
    def of_words(words: Sequence[str]) -> LogSetup | None:
        """Reads a setup from the words that `words` returned; None for no words."""
        if len(words) != 3:
            return None
        form: LogFormat = "json" if words[0] == "json" else "text"
        return LogSetup(format=form, is_detailed=words[1] == "detailed", process=words[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIds:
    """Ids of a request, which are part of its JSON log lines."""

    request_id: str
    trace_id: str | None = None
    span_id: str | None = None


_IDS: ContextVar[RequestIds | None] = ContextVar("milepost_request_ids", default=None)


MAX_SHOWN = 300
"""Largest number of characters shown of what others said."""


def shown(said: object) -> str:
    """Returns what another program said, as a part of one line."""
    text = str(said)[:MAX_SHOWN]
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@contextmanager
def of_request(ids: RequestIds) -> Iterator[None]:
    """Inside, all lines logged by this task, and by threads that it waits for, carry the ids."""
    token = _IDS.set(ids)
    try:
        yield
    finally:
        _IDS.reset(token)


def _stderr() -> TextIO:
    return sys.stderr.stream if isinstance(sys.stderr, StrayText) else sys.stderr


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error, formatted and filtered by a setup."""

    def __init__(self, setup: LogSetup, formatter: logging.Formatter) -> None:
        super().__init__(_stderr())
        self.setup = setup
        self.setFormatter(formatter)


class JsonFormatter(logging.Formatter):
    """Makes a line of JSON. `fields` of a record, set with `extra`, become members of their own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        line |= _ids()
        line |= {name: value for name, value in _fields(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class FieldsFormatter(logging.Formatter):
    """Makes a line of JSON from a record's `fields` alone, for the access log among lines of
    text."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=True, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, "fields", {})
    return found


def _ids() -> dict[str, str]:
    ids = _IDS.get()
    if ids is None:
        return {}
    found = {"request_id": ids.request_id, "trace_id": ids.trace_id, "span_id": ids.span_id}
    return {name: value for name, value in found.items() if value is not None}


def current() -> LogSetup | None:
    """Returns how this process logs; None if the program that embeds us configured logging."""
    handlers = logging.getLogger().handlers
    return next((one.setup for one in handlers if isinstance(one, StderrHandler)), None)


def set_up(setup: LogSetup) -> None:
    """Configures logging for this process. A program that has configured the root logger already
    keeps what it has."""
    is_json = setup.format == "json"
    form = JsonFormatter(setup.process) if is_json else logging.Formatter(_TEXT)
    forms = {_STATS: form, _ACCESS: form if is_json else FieldsFormatter()}
    if is_json:
        forms[START] = form
    for name, own_form in forms.items():
        logger = logging.getLogger(name)
        logger.handlers = [StderrHandler(setup, own_form)]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    root = logging.getLogger()
    if all(isinstance(handler, StderrHandler) for handler in root.handlers):
        root.handlers = [StderrHandler(setup, form)]
        root.setLevel(logging.INFO if setup.is_detailed else logging.WARNING)
        if is_json:
            _catch_the_rest()


def _catch_the_rest() -> None:
    """Logs uncaught exceptions, warnings, and text for standard error."""
    logger = logging.getLogger("milepost")

    def unraisable(found: Any) -> None:
        error = found.exc_value
        logger.error("%s: %r", found.err_msg or "exception ignored", found.object, exc_info=error)

    def in_thread(found: Any) -> None:
        if not isinstance(found.exc_value, SystemExit):
            logger.critical("a thread failed: %s", found.thread, exc_info=found.exc_value)

    def uncaught(kind: Any, error: BaseException, traceback: Any) -> None:
        logger.critical("uncaught: %s", kind.__name__, exc_info=(kind, error, traceback))

    sys.excepthook, sys.unraisablehook = uncaught, unraisable
    threading.excepthook = in_thread
    logging.captureWarnings(True)
    sys.stderr = StrayText(_stderr(), logging.getLogger("stderr").warning)


MAX_CHARS = 2**16
"""Largest length of a line; longer ones are cut into several."""


class StrayText(io.TextIOBase):
    """Calls `say("%s", line)` for each line written. Lines that are overwritten on a terminal, such
    as progress bars, are left out. `stream` is the stream that this one replaces. Text that `say`
    itself writes is dropped, as it has nowhere to go."""

    def __init__(self, stream: TextIO, say: Callable[..., object]) -> None:
        self.stream = stream
        self._say = say
        self._own = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        state: Any = self._own
        if getattr(state, "is_saying", False):
            return len(text)
        *lines, rest = (getattr(state, "rest", "") + text).split("\n")
        if len(rest) > MAX_CHARS:
            lines, rest = [*lines, rest], ""
        state.rest, state.is_saying = rest, True
        try:
            for line in lines:
                shown = line.rstrip("\r").rpartition("\r")[2]
                if shown.strip():
                    self._say("%s", shown)
        finally:
            state.is_saying = False
        return len(text)
