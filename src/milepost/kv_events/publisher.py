"""Publishes the cache's events over ZeroMQ, and replays them to routers that missed some.

A message is [topic, number (8 bytes, big-endian), payload]. A request [b"", number] to the replay
socket is answered with all messages from that number on as [b"", topic, number, payload], and at
the end [b"", b"", -1, b""]. A thread owns sockets and payloads, so steps wait for neither. Only a
full queue makes a step wait, since a router that missed an event would have a wrong picture of the
cache. Nothing a router sends ends the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from milepost.cache.events import Event
from milepost.engine.off_device import OffDevice
from milepost.errors import ConfigError
from milepost.kv_config import KVEventsConfig
from milepost.kv_events.messages import MessageWriter
from milepost.scheduler.outside import Outside
from milepost.zeromq import bell_pair, bound, received

logger = logging.getLogger(__name__)

LINGER_MS = 100
"""Longest time that `close` waits for messages to be sent."""
ALIVE_S = 1.0
"""Seconds between the checks of a waiting engine whether the thread is alive."""
MAX_BYTES = 2**16
"""Largest number of bytes of a message from a router: a subscription or a number."""
END = (-1).to_bytes(8, "big", signed=True)


def open_publisher(config: KVEventsConfig, page_size: int, outside: Outside) -> EventPublisher:
    """Returns a publisher of the events that `outside` tells. Raises ConfigError."""
    publisher = EventPublisher(config, page_size)
    outside.add_listener(publisher.publish)
    return publisher


class EventPublisher(OffDevice):
    """Publishes events in a thread of its own. Raises ConfigError if an address cannot be used.
    `close` it at the end.
    """

    def __init__(
        self, config: KVEventsConfig, page_size: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._clock = clock
        self._messages = MessageWriter(page_size, config.format, config.hashes)
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[float, tuple[Event, ...]]] = queue.Queue(
            config.max_queue_size
        )
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_sent = 0
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._publishing = self._socket(zmq.PUB, config.endpoint, config.hwm)
            replay, most = config.replay_endpoint, config.buffer_steps + 1
            self._replaying = None if replay is None else self._socket(zmq.ROUTER, replay, most)
        except ConfigError:
            self._close()
            raise
        self._bell, self._ear = bell_pair(self._context)
        self._sockets += self._bell, self._ear
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def publish(self, events: tuple[Event, ...]) -> None:
        """Queues events for publishing, in order. Raises RuntimeError if the thread has ended."""
        if not events:
            return
        told = self._clock(), events
        while True:
            if not self._thread.is_alive():
                raise RuntimeError("the thread that publishes KV events has ended")
            with suppress(queue.Full):
                self._queue.put(told, timeout=ALIVE_S)
                break
        self._bell.send(b"")

    def close(self, *, is_whole: bool = True) -> None:  # noqa: ARG002
        """Publishes the queued events and frees the addresses."""
        self._bell.send(b"end")
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=LINGER_MS)
        self._context.term()

    def _socket(self, kind: int, address: str, max_queued: int) -> zmq.Socket[bytes]:
        socket = bound(self._context.socket(kind), max_bytes=MAX_BYTES, max_queued=max_queued)
        self._sockets.append(socket)
        try:
            is_open = not address.startswith("tcp://") or "*" in address or "::" in address
            if kind == zmq.ROUTER or is_open:  # subscribers that ask for a replay connect
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events_config: cannot use {address}: {error}") from error
        return socket

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        if self._replaying is not None:
            poller.register(self._replaying, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll())
            if self._ear in ready:
                is_open = not self._ear.recv()
                self._send_queued()
            if self._replaying in ready:
                try:
                    self._replay()
                except Exception:
                    logger.exception("a router could not be sent again what it missed")

    def _send_queued(self) -> None:
        while not self._queue.empty():
            now_s, events = self._queue.get()
            for payload in self._messages.payloads(events, now_s):
                number = self._num_sent
                self._num_sent += 1
                self._sent.append((number, payload))
                self._publishing.send_multipart((self._topic, _packed(number), payload))

    def _replay(self) -> None:
        assert self._replaying is not None, "only a socket that is there is ready"
        frames = received(self._replaying)
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        who, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._sent:
            if number >= first:
                parts = who, b"", self._topic, _packed(number), payload
                self._replaying.send_multipart(parts)
        self._replaying.send_multipart((who, b"", b"", END, b""))


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "big")
