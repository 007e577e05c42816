"""The `milepost` command: parses the command line, and turns every outcome into an exit status.

0 means success, 1 a server whose engine died or a system that refuses (a full disk, too many open
files), 2 a user's mistake (one line on standard error, no traceback), 130 Ctrl-C, 141 an output
whose reader has closed it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TextIO

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

import milepost
from milepost.annexes import annex, is_installed
from milepost.cli.chat import chat_command
from milepost.cli.config_file import Arguments, with_file
from milepost.cli.display import Screen
from milepost.cli.generate import StreamingEngine, generate_command
from milepost.cli.kernels import kernels_command, warm_command
from milepost.cli.plan import plan_command
from milepost.cli.run_batch import run_batch_command
from milepost.cli.serve import Serve, forget_stdout, run_server, serve_command
from milepost.cli.verify import verify_command
from milepost.cli.vllm_flags import translated, with_environment
from milepost.config import EngineConfig
from milepost.errors import ConfigError, MilepostError
from milepost.models.early import refuse_early


def main(
    arguments: Sequence[str] | None = None,
    *,
    open_engine: Callable[[EngineConfig], StreamingEngine] | None = None,
    screen: Screen | None = None,
    stdin: TextIO | None = None,
    serve: Serve | None = None,
) -> int:
    """Runs one command line (by default the process's own) and returns its exit status."""
    screen = screen or _process_screen()
    given = Arguments(list(sys.argv[1:] if arguments is None else arguments))
    words = given.words
    parts = open_engine or open_llm, screen, stdin or sys.stdin, serve or run_server
    app = build_app(*parts, wanted=words[0] if words else None)
    try:
        _require_directory()
        if words[:1] in (["serve"], ["run-batch"]):
            given = with_file(words[1:])
            words = [words[0], *translated(given.words)]
        words = with_environment(words, os.environ)
        status = app(
            words,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (MilepostError, CycloptsError) as error:
        screen.error(given.placed(str(error)))
        return 2
    except KeyboardInterrupt:
        screen.reports.print()
        return 130
    except BrokenPipeError:
        forget_stdout()
        return 141
    except UnicodeDecodeError as error:
        screen.error(f"use UTF-8 text ({error})")
        return 2
    except OSError as error:
        if error.strerror is None:
            raise
        screen.error(_refused(error))
        return 1
    return status if isinstance(status, int) else 0


def _refused(error: OSError) -> str:
    """Returns what the system refused, and where."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        forget_stdout()
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    hint = ": raise `ulimit -n`" if error.errno == errno.EMFILE else ""
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}{hint}"


def build_app(
    open_engine: Callable[[EngineConfig], StreamingEngine],
    screen: Screen,
    stdin: TextIO,
    serve: Serve,
    wanted: str | None = None,
) -> App:
    """Builds the application with the `wanted` command, or with all of them if there is none of
    that name. The flags of all commands take as long as parsing the words of one."""
    app = App(
        name="milepost",
        help="Runs hybrid language models with a prefix cache that works, and says why it misses.",
        version=milepost.__version__,
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    commands: dict[str, Callable[[], Callable[..., Any]]] = {
        "generate": lambda: generate_command(open_engine, screen, stdin),
        "chat": lambda: chat_command(open_engine, screen, stdin),
        "serve": lambda: serve_command(serve),
        "run-batch": lambda: run_batch_command(screen.reports),
        "simulate": lambda: annex_command("simulate", screen),
        "bench": lambda: annex_command("bench", screen),
        "kernels": lambda: kernels_command(screen),
        "plan": lambda: plan_command(screen),
        "warm": lambda: warm_command(screen),
        "verify": lambda: verify_command(screen),
    }
    for name, make in commands.items():
        if name == wanted or wanted not in commands:
            app.command(make(), name=name)
    return app


def annex_command(name: str, screen: Screen) -> Callable[..., Any]:
    """Returns an annex's command, or one that raises ConfigError if the annex is not installed."""
    wanted_by = f"milepost {name}"
    if is_installed(name):
        command: Callable[..., Any] = annex(name, wanted_by=wanted_by).command(screen)
        return command

    def lacking(*_: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
        """Not installed here."""
        annex(name, wanted_by=wanted_by)

    lacking.__name__ = name
    return lacking


def open_llm(config: EngineConfig) -> StreamingEngine:
    """Opens the real engine and loads its weights. Raises ConfigError and WeightsError."""
    refuse_early(config)
    return milepost.LLM(**asdict(config))


def _require_directory() -> None:
    """Raises ConfigError if the working directory was deleted: nothing can be imported from there,
    and no process started."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was deleted: change to another one") from error


def _process_screen() -> Screen:
    reports = Console(stderr=True, highlight=False)
    return Screen(answers=sys.stdout, reports=reports, clock=time.perf_counter)
