"""`milepost serve`: an OpenAI-compatible server. Its flags are the fields of two dataclasses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from cyclopts import Group, Parameter

from milepost.cli.config_file import ConfigFile
from milepost.cli.flags import ENGINE, Flags, ModelArgument, add_flags, one_model
from milepost.config import EngineConfig
from milepost.errors import MilepostError, needing
from milepost.logs import START, LogSetup, set_up
from milepost.models.early import refuse_early
from milepost.server.config import ServerConfig

SERVER = Flags(
    config=ServerConfig,
    group=Group("Server", sort_key=1),
    renamed={},
    with_negative=("special_tokens_in_content",),
)

logger = logging.getLogger(__name__)
start_logger = logging.getLogger(START)

Serve = Callable[[ServerConfig, EngineConfig], int]


def serve_command(serve: Serve) -> Callable[..., int]:
    """Makes the command; `serve` runs the server."""

    def serve_(
        checkpoint: Annotated[ModelArgument, Parameter(group=SERVER.group)] = None,
        /,
        *,
        verbose: Annotated[
            bool, Parameter(negative=(), help="Log what the engine does.", group=SERVER.group)
        ] = False,
        config: Annotated[ConfigFile, Parameter(group=SERVER.group)] = None,  # noqa: ARG001
        **settings: Any,
    ) -> int:
        """Serve a model over HTTP, with OpenAI's API.

        The address goes to standard output once requests are accepted; logs go to standard error.
        Command lines of `vllm serve` are accepted; flags that cannot be served are named.
        """
        is_json = settings.get("log_format") == "json"
        set_up(LogSetup(format="json" if is_json else "text", is_detailed=verbose))
        try:
            return serve_as(checkpoint, settings)
        except MilepostError as error:
            if not is_json:
                raise
            logger.error("%s", error)
            return 2

    def serve_as(checkpoint: str | None, settings: dict[str, Any]) -> int:
        settings["model"] = one_model(checkpoint, settings.get("model"))
        if settings.get("api_key") is None and settings.get("key_file") is None:
            settings["api_key"] = _keys_of(os.environ)
        if settings.get("admin_key") is None and settings.get("admin_key_file") is None:
            settings["admin_key"] = _admin_keys_of(os.environ)
        server, engine = SERVER.build(settings), ENGINE.build(settings)
        if server.log_format == "json":
            start_logger.info("loading %s", engine.model or "the embedded model")
        elif sys.stderr.isatty():
            print(f"loading {engine.model or 'the embedded model'}", file=sys.stderr)
        return serve(server, engine)

    serve_.__name__ = "serve"
    return add_flags(serve_, [SERVER, ENGINE])


def _keys_of(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the API key from the environment. vLLM's name counts too: a server that is started as
    before must not answer without its key."""
    key = environment.get("MILEPOST_API_KEY") or environment.get("VLLM_API_KEY")
    return [key] if key else None


def _admin_keys_of(environment: Mapping[str, str]) -> list[str] | None:
    key = environment.get("MILEPOST_ADMIN_KEY")
    return [key] if key else None


def run_server(server: ServerConfig, engine: EngineConfig) -> int:
    """Runs the real server. Raises ConfigError if its libraries are not installed, and what the
    model's `config.json` makes certain."""
    refuse_early(engine)
    from milepost.engine.text import without_torch  # imports numpy

    without_torch()  # the engine runs in its own process
    with needing("the server", "server"):
        from milepost.server.run import run
    announce = _log_address if server.log_format == "json" else _announce
    return run(server, engine, announce=announce)


def _announce(address: str, subjects: Sequence[tuple[str, str]]) -> None:
    """Prints the address to standard output, for programs; facts for a person come first, on
    standard error."""
    lines = (f"{name:>13}  {words}" for name, words in subjects)
    with suppress(OSError):
        print("", *lines, "", sep="\n", file=sys.stderr)
    _print_address(address)


def _log_address(address: str, subjects: Sequence[tuple[str, str]]) -> None:
    """Prints the address to standard output, and logs it with the facts."""
    fields = {name.replace(" ", "_"): words for name, words in subjects}
    start_logger.info("listens on %s", address, extra={"fields": {"address": address, **fields}})
    _print_address(address)


def _print_address(address: str) -> None:
    try:
        print(f"Milepost listens on {address}", flush=True)
    except OSError as error:  # closed or full: nobody reads the address, but the server runs
        logger.warning("the address, %s, cannot be written: %s", address, error.strerror)
        forget_stdout()


def forget_stdout() -> None:
    """Keeps the interpreter from flushing into a closed pipe or a full disk when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
