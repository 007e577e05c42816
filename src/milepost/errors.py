"""Every error that Milepost raises on purpose.

    MilepostError
    ├── InvalidRequestError (ValueError)    the caller's prompt, marks or sampling parameters
    │   └── InvalidPromptError              the prompt or its marks
    ├── ConfigError (ValueError)            the engine's configuration
    │   └── UnsupportedModelError           an architecture or a feature that we do not run
    ├── WeightsError (ValueError)           weight files that are missing, truncated or do not fit
    ├── KernelError (RuntimeError)          a kernel that does not run on this GPU
    ├── TraceError (ValueError)             a trace or cost model that the simulator cannot read
    ├── EngineAsleepError (RuntimeError)    the engine was put to sleep
    ├── EngineDeadError (RuntimeError)      the step loop failed; no request can be answered
    ├── QueueFullError (RuntimeError)       a server has as many requests as it accepts; try again
    ├── QueueWaitError (RuntimeError)       a request would wait longer than allowed; try again
    ├── RequestTimeoutError (TimeoutError)  a request took longer than a server allows
    └── ServerClosingError (RuntimeError)   a server is about to end and takes or finishes no more

`InvalidRequestError` concerns one request: the engine goes on serving the others. Messages name the
offending value and what to do next. A broken invariant of ours is an `assert`, never one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MilepostError(Exception):
    """Root of the tree; catch it to catch all of Milepost's errors."""


class InvalidRequestError(MilepostError, ValueError):
    """The request cannot be served as it stands."""


class InvalidPromptError(InvalidRequestError):
    """The prompt, or its marks, cannot be served. `is_too_long`: it exceeds the model's maximum
    length."""

    def __init__(self, message: str, *, is_too_long: bool = False) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long


class ConfigError(MilepostError, ValueError):
    """The engine cannot be built from this configuration."""


class UnsupportedModelError(ConfigError):
    """The checkpoint needs something that Milepost does not run."""


class WeightsError(MilepostError, ValueError):
    """The weight files do not hold what the model needs."""


class KernelError(MilepostError, RuntimeError):
    """A kernel does not compile for the GPU, or needs more than the GPU has."""


class TraceError(MilepostError, ValueError):
    """A line of a trace, or a cost model, is not as documented."""


class EngineDeadError(MilepostError, RuntimeError):
    """The step loop raised; no request of this engine can be answered."""


class QueueFullError(MilepostError, RuntimeError):
    """The maximum number of requests is already queued."""


class QueueWaitError(MilepostError, RuntimeError):
    """The request would wait too long before it begins, or has; try again in `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(MilepostError, TimeoutError):
    """The request took longer than allowed."""


class EngineAsleepError(MilepostError, RuntimeError):
    """The engine was put to sleep and takes no requests."""


class ServerClosingError(MilepostError, RuntimeError):
    """The server is shutting down."""


def how_to_install(extra: str) -> str:
    """Returns the command that installs one of our extras; no package index has Milepost."""
    return f"install it with `pip install '.[{extra}]'` in a checkout"


def missing(what: str, library: str | None, extra: str) -> ConfigError:
    """Makes the error for a feature whose library, brought by an extra, is not installed."""
    return ConfigError(f"{what} needs {library}: {how_to_install(extra)}")


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Makes imports inside raise ConfigError (`missing`) for modules that are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(what, error.name, extra) from error
