"""The server as an ASGI application, for a program's own server or application."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import Any, Unpack

from milepost.config import EngineConfig
from milepost.engine.options import EngineOptions, read_options
from milepost.engine.processes import EngineClient, LoadedOnce
from milepost.errors import ServerClosingError
from milepost.server import app
from milepost.server.config import ServerConfig
from milepost.server.loading import load


class EmbeddedServer:
    """Loads the model with the lifespan of its host, or else with the first request. Ends with the
    lifespan, by `close`, or with the program.

    A host that mounts it runs no lifespan for it: such a program calls `start` and `close`.
    """

    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        self._client = EngineClient(
            engine_config,
            max_waiting=config.max_waiting,
            step_timeout_s=config.step_timeout_s or None,
        )
        self._service = LoadedOnce(partial(load, config, engine_config, self._client))
        self._app: Any = None

    async def start(self) -> None:
        """Loads the model, unless that has begun. Raises ConfigError, UnsupportedModelError,
        WeightsError and EngineDeadError."""
        service = await self._service.get()
        self._app = self._app or app.build(service)

    async def close(self) -> None:
        """Ends the engine. Requests that are running fail, so have the host finish them first."""
        service = await self._service.end()
        if service is not None:
            service.is_closing = True
            self._client.fail_all(ServerClosingError("the server shut down"))
        await self._client.close()
        if service is not None:
            await service.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._app is None:
            await self.start()
        await self._app(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        """Follows the protocol of lifespans. An exception fails the host's start."""
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


def create_app(
    model: str | PathLike[str] | None = None,
    *,
    config: ServerConfig | None = None,
    **options: Unpack[EngineOptions],
) -> EmbeddedServer:
    """Returns the server of `milepost serve` as an ASGI application, with an engine of its own.

    Options are those of `LLM`; `config` has those of the server, without the ones that concern
    sockets and signals: these are the host's. Raises ConfigError.
    """
    return EmbeddedServer(config or ServerConfig(), read_options(model, options))
