"""`milepost run-batch`: answers the requests of a file without a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from cyclopts import Group, Parameter
from rich.console import Console

from milepost.cli.config_file import ConfigFile
from milepost.cli.display import counting_requests
from milepost.cli.flags import ENGINE, Flags, add_flags
from milepost.errors import ConfigError, needing
from milepost.logs import LogSetup, set_up
from milepost.models.early import refuse_early
from milepost.server.config import ServerConfig

_DAY_S = 86400.0
_OF_REQUESTS = (
    "served_model_name",
    "request_timeout_s",
    "step_timeout_s",
    "grammar_timeout_s",
    "max_request_bytes",
    "strict",
    "chat_template",
    "default_chat_template_kwargs",
    "override_generation_config",
    "tool_call_parser",
    "reasoning_parser",
    "special_tokens_in_content",
    "log_format",
    "otlp_traces_endpoint",
)
"""Fields of ServerConfig that have a meaning without a socket."""
REQUESTS = Flags(
    config=ServerConfig,
    group=Group("Requests", sort_key=1),
    renamed={},
    left_out={each.name for each in fields(ServerConfig)}.difference(_OF_REQUESTS),
    defaults={"request_timeout_s": _DAY_S},
    with_negative=("special_tokens_in_content",),
)


def run_batch_command(reports: Console) -> Callable[..., int]:
    """Makes the command; it prints its summary to `reports`."""

    def run_batch(
        *,
        input_file: Annotated[
            Path,
            Parameter(alias="-i", help="A request in each line, as in OpenAI's batch files."),
        ],
        output_file: Annotated[
            Path, Parameter(alias="-o", help="Gets one line per request, in order of completion.")
        ],
        verbose: Annotated[bool, Parameter(negative=(), help="Log what the engine does.")] = False,
        config: ConfigFile = None,  # noqa: ARG001
        **settings: Any,
    ) -> int:
        """Answer the requests of a file.

        Lines are those of OpenAI's batch files: {"custom_id": "1", "method": "POST", "url":
        "/v1/chat/completions", "body": {...}}. A request that cannot be answered gets an `error`,
        and the exit status is 1. Command lines of `vllm run-batch` are accepted.
        """
        # A batch needs no access log: errors are in the output.
        values = {**REQUESTS.given(settings), "access_log": False, "ui": False}
        server, engine = ServerConfig(**values), ENGINE.build(settings)
        _check_files(input_file, output_file)
        refuse_early(engine)
        set_up(LogSetup(format=server.log_format, is_detailed=verbose))
        start = time.perf_counter()
        with input_file.open("rb") as source, counting_requests(reports) as progress:
            counts = _runner()(server, engine, source, lambda: _opened(output_file), progress)
        seconds = time.perf_counter() - start
        failed = "".join(f", {n} with {status}" for status, n in sorted(counts.statuses.items()))
        reports.print(
            f"{counts.answered} answered, {counts.failed} failed{failed}, {seconds:.1f} s: "
            f"{output_file}"
        )
        return 1 if counts.failed else 0

    run_batch.__name__ = "run-batch"
    return add_flags(run_batch, [REQUESTS, ENGINE])


def _check_files(source: Path, target: Path) -> None:
    """Raises ConfigError for files that cannot be used, before the model is loaded."""
    if not source.is_file():
        raise ConfigError(f"input_file={str(source)!r}: there is no such file")
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"output_file={str(target)!r}: name a file in an existing folder")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"output_file={str(target)!r}: this is the input file")


def _opened(target: Path) -> BinaryIO:
    """Opens the output file. Raises ConfigError if it cannot be written."""
    try:
        return target.open("wb")
    except OSError as error:
        raise ConfigError(f"output_file={str(target)!r}: {error.strerror}") from error


def _runner() -> Callable[..., Any]:
    """Returns the function that answers a batch. Raises ConfigError if its libraries are not
    installed."""
    from milepost.engine.text import without_torch  # imports numpy

    without_torch()  # the engine runs in its own process
    with needing("run-batch", "server"):
        from milepost.server.batch import run_batch
    return run_batch
