"""`milepost serve`: starts the engine and the HTTP server, and stops both.

The listening socket is bound first, so a port in use is found before the weights are loaded. On
SIGTERM, SIGHUP or Ctrl-C the server accepts no new connections, answers new requests with 503, and
lets running ones finish within `shutdown_timeout_s`; then they fail. When the engine dies, every
open request gets an error and the server exits with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from milepost.config import EngineConfig
from milepost.engine import heap
from milepost.engine.processes import EngineClient
from milepost.engine.text import with_overrides
from milepost.errors import ConfigError, ServerClosingError
from milepost.server import app
from milepost.server.config import ServerConfig, read_keys, read_object, read_template
from milepost.server.connections import RESERVED_FILES, protocol, raise_file_limit
from milepost.server.loading import describe, load
from milepost.server.service import Service
from milepost.server.stats import log_stats

T = TypeVar("T")

logger = logging.getLogger(__name__)

Announce = Callable[[str, Sequence[tuple[str, str]]], None]
"""Announces a server by its address, and by pairs of a subject and its description."""

BACKLOG = 2048
SEND_BUFFER_BYTES = 2**17
"""Send buffer of a connection: memory that a client which does not read can take before it is
noticed."""
LAST_WORDS_S = 5.0
"""Time for the errors of a shutdown to reach the clients."""


def run(
    server_config: ServerConfig,
    engine_config: EngineConfig,
    announce: Announce,
) -> int:
    """Serves until it is told to stop, and returns the exit status. Raises ConfigError and
    WeightsError.

    `announce` is called once requests are accepted.
    """
    read_keys("key_file", server_config.key_file)
    read_keys("admin_key_file", server_config.admin_key_file)
    read_template(server_config.chat_template)
    given = read_object("override_generation_config", server_config.override_generation_config)
    with_overrides({}, given)
    _check_tls(server_config)
    max_files = raise_file_limit()
    with _listen(server_config) as sock:
        loop_factory = uvicorn.Config(app="", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(server_config, engine_config, sock, max_files, announce))


async def _serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    sock: socket.socket,
    max_files: int,
    announce: Announce,
) -> int:
    server: HttpServer | None = None

    def stop(_: str) -> None:
        if server is not None:
            server.should_exit = True

    client = EngineClient(
        engine_config,
        max_waiting=config.max_waiting,
        step_timeout_s=config.step_timeout_s or None,
        on_death=stop,
    )
    try:
        service = await _unless_told_to_stop(load(config, engine_config, client))
        if service is None:
            return 0
        server = HttpServer(service, max_files)
        if client.death is not None:  # it died while the tokenizer was loaded
            return 1
        heap.settle()
        announce(_address(config, sock), describe(service))
        stats = None if engine_config.disable_log_stats else asyncio.create_task(log_stats(client))
        await server.serve(sockets=[sock])
        if stats is not None:
            stats.cancel()
        await service.close()
    finally:
        await client.close()
    return 0 if client.death is None else 1


async def _unless_told_to_stop(work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`, or None if a signal to end comes first, which cancels it."""
    task = asyncio.ensure_future(work)
    with _on_signals(lambda _: task.cancel()):
        try:
            return await task
        except asyncio.CancelledError:
            logger.warning("told to stop before requests were accepted")
            return None


@contextlib.contextmanager
def _on_signals(handle: Callable[[int], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` sets it
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class HttpServer(uvicorn.Server):
    """uvicorn with an orderly end: requests get an error rather than a closed connection."""

    def __init__(self, service: Service, max_files: int) -> None:
        limit = service.config.shutdown_timeout_s
        super().__init__(
            uvicorn.Config(
                app.build(service),
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                ws="none",
                **_tls(service.config),
                http=protocol(
                    max_connections=service.config.max_connections or max_files - RESERVED_FILES,
                    head_timeout_s=service.config.head_timeout_s,
                    write_timeout_s=service.config.write_timeout_s,
                ),
                timeout_keep_alive=math.ceil(service.config.keep_alive_timeout_s),
                timeout_graceful_shutdown=int(limit + LAST_WORDS_S) + 1,
            )
        )
        self._service = service
        self._is_told_twice = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Lets a signal end `serve`; uvicorn would raise it again before the engine has stopped."""
        with _on_signals(self._told_to_end):
            yield

    def _told_to_end(self, number: int) -> None:
        """Handles a signal. A second Ctrl-C ends the running requests, a third waits for
        nothing."""
        if not self.should_exit:
            self.handle_exit(number, None)
            self._say_what_is_awaited()
        elif number == signal.SIGINT and not self._is_told_twice:
            self._is_told_twice = True
            self._end_requests("it was told to stop at once")
        else:
            self.handle_exit(number, None)

    def _say_what_is_awaited(self) -> None:
        running, limit = self._service.client.num_in_flight, self._service.config.shutdown_timeout_s
        if running:
            logger.warning(
                "shutting down: answers still running: %d; they have %g seconds "
                "(Ctrl-C again ends them now)",
                running,
                limit,
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_closing = True
        self._service.client.fail_questions(ServerClosingError("the server is shutting down"))
        limit = self._service.config.shutdown_timeout_s
        why = f"running requests had {limit:g} seconds"
        timer = asyncio.get_running_loop().call_later(limit, self._end_requests, why)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            timer.cancel()

    def _end_requests(self, why: str) -> None:
        self._service.client.fail_all(ServerClosingError(f"the server shut down: {why}"))


def _listen(config: ServerConfig) -> socket.socket:
    """Returns the listening socket. Raises ConfigError if the address is not available."""
    try:
        if config.uds is not None:
            return _listen_uds(Path(config.uds))
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # asyncio switches Nagle's algorithm off only if the protocol is named. It would delay the
        # second small write, the first token, until the client's ACK.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        hint = ""
        if error.errno == errno.EADDRINUSE and config.uds is None:
            hint = "; choose another with --port, 0 takes a free one"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}{hint}") from error
    return sock


def _listen_uds(path: Path) -> socket.socket:
    """Returns a socket at `path`. An old socket file without a listener is replaced."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(f"{path} is in use")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    os.chmod(path, 0o600)
    sock.listen(BACKLOG)
    return sock


def _tls(config: ServerConfig) -> dict[str, Any]:
    """Returns uvicorn's settings."""
    requires = ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED
    return {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": requires,
    }


def _check_tls(config: ServerConfig) -> None:
    """Raises ConfigError for a certificate that cannot be used."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # includes ssl.SSLError
        where = f"{config.ssl_certfile!r}, ssl_keyfile={config.ssl_keyfile!r}"
        raise ConfigError(f"ssl_certfile={where}: {error.strerror or error}") from error


def _address(config: ServerConfig, sock: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
