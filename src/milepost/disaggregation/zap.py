"""Decides who may connect: engines whose addresses are among this one's peers.

ZeroMQ asks a handler once for each connection, before it takes a message (ZAP,
https://rfc.zeromq.org/spec/27). Used by the thread that talks to other engines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

from milepost.kv_config import PeerNetworks
from milepost.logs import shown

logger = logging.getLogger(__name__)

DOMAIN = b"milepost"
QUIET_S = 60.0
"""Least time between two log entries of one kind of misbehaviour by others."""
MAX_KINDS = 64


class ThrottledWarnings:
    """Logs misbehaviour of other engines without letting them fill a disk."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """Maps a kind to when it was last logged, and how often it has occurred since."""
        self._lock = threading.Lock()

    def warn(self, kind: str, detail: object = "") -> None:
        """Logs a warning unless one of its kind was logged recently. May be called from any
        thread."""
        with self._lock:
            now = self._clock()
            logged_at, num_since = self._logged.pop(kind, (now - QUIET_S, 0))
            if now - logged_at < QUIET_S:
                self._logged[kind] = logged_at, num_since + 1
                return
            more = f" ({num_since} more since the last time)" if num_since else ""
            logger.warning("%s: %s%s", kind, shown(detail), more)
            self._logged[kind] = now, 0
            if len(self._logged) > MAX_KINDS:
                del self._logged[next(iter(self._logged))]


class ZapHandler:
    """Decides about connections to the sockets that `guard` was called with."""

    def __init__(
        self, context: zmq.Context[Any], peers: PeerNetworks, warnings: ThrottledWarnings
    ) -> None:
        self._peers = peers
        self._warnings = warnings
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Makes connections to a socket subject to `answer`. Call it before the socket is bound."""
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def answer(self) -> None:
        """Accepts or refuses one connection."""
        _, request, _, address, *_ = self.socket.recv_multipart()
        host = address.decode("ascii", "replace")
        is_peer = host in self._peers
        if not is_peer:
            self._warnings.warn("a connection of no peer's is refused", host)
        status = (b"200", b"OK") if is_peer else (b"400", b"not a peer")
        self.socket.send_multipart([b"1.0", request, *status, b"", b""])

    def close(self) -> None:
        self.socket.close(linger=0)
