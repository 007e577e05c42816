"""Closes connections so that clients which are still sending can read their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Lingering:
    """A transport for clients that may still be sending when it is closed.

    A socket that is closed with unread bytes is reset, and the reset may reach the client before it
    has read its answer. So such a connection is read for a while longer (RFC 9112, section 9.6).
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        is_receiving: Callable[[], bool],
        linger: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._is_receiving, self._linger = is_receiving, linger
        self._is_finished = False
        self.write, self.abort = transport.write, transport.abort

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_finished or self._transport.is_closing()

    def close(self) -> None:
        """Closes at once, or after a while if the client is still sending."""
        if self._is_receiving() and not self.is_closing():
            self._linger()
        else:
            self._transport.close()

    def finish(self) -> None:
        """Lets nothing more be written."""
        self._is_finished = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
