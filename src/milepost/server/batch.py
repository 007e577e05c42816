"""`milepost run-batch`: answers the requests of a file, one per line as in OpenAI's batch files.

The lines go through the same application as a server's requests, without a socket. Enough of them
are in progress to fill the engine's steps, and the file is read no further ahead. Each result is
written as soon as it is ready. A line that cannot be answered fails alone, and so does one whose
custom_id an earlier line has, since their results could not be told apart.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from milepost.config import EngineConfig
from milepost.engine import heap
from milepost.engine.processes import EngineClient
from milepost.server import app
from milepost.server.config import ServerConfig
from milepost.server.errors import error_body
from milepost.server.loading import load
from milepost.server.stats import log_stats

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
NUM_AHEAD = 2
"""Lines in progress per sequence that can run: the waiting ones take places as they become free."""
_NO_LIMIT = 2**31

OnLine = Callable[[bool], None]
"""Called for each finished line with whether it was answered."""


class Line(msgspec.Struct):
    """A request. The body stays as it is written."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Name(msgspec.Struct):
    custom_id: Any = None


class _Stream(msgspec.Struct):
    stream: Any = None


@dataclass(slots=True)
class Tally:
    answered: int = 0
    failed: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """Number of failed lines by status."""


class LineError(Exception):
    """A line that is not a request."""


def run_batch(
    config: ServerConfig,
    engine_config: EngineConfig,
    source: Iterable[bytes],
    open_target: Callable[[], BinaryIO],
    progress: OnLine,
) -> Tally:
    """Answers all lines of `source`. The target is opened once requests are accepted.

    Raises ConfigError and WeightsError.
    """

    async def work() -> Tally:
        async with _application(config, engine_config) as application:
            num_ahead = NUM_AHEAD * engine_config.max_num_seqs
            with open_target() as target:
                return await answer_all(application, source, target, num_ahead, progress)

    return asyncio.run(work())


@asynccontextmanager
async def _application(config: ServerConfig, engine_config: EngineConfig) -> AsyncIterator[Any]:
    client = EngineClient(
        engine_config, max_waiting=_NO_LIMIT, step_timeout_s=config.step_timeout_s or None
    )
    stats = None
    try:
        service = await load(config, engine_config, client)
        heap.settle()
        if not engine_config.disable_log_stats:
            stats = asyncio.create_task(log_stats(client))
        yield app.build(service)
        await service.close()
    finally:
        if stats is not None:
            stats.cancel()
        await client.close()


async def answer_all(
    application: Any,
    source: Iterable[bytes],
    target: BinaryIO,
    num_ahead: int,
    progress: OnLine,
) -> Tally:
    """Asks the application for every line that is not empty, `num_ahead` at a time, and writes
    results in the order in which they finish. Raises OSError if they cannot be written."""
    counts, places, custom_ids = Tally(), asyncio.Semaphore(num_ahead), CustomIds()

    async def answer_one(line: bytes, number: int) -> None:
        try:
            result, status = await answer(application, line, number, custom_ids)
        finally:
            places.release()
        target.write(msgspec.json.encode(result) + b"\n")
        target.flush()
        is_answered = status == 200
        counts.answered += is_answered
        if not is_answered:
            counts.failed += 1
            counts.statuses[status] = counts.statuses.get(status, 0) + 1
        progress(is_answered)

    try:
        async with asyncio.TaskGroup() as tasks:
            for number, line in enumerate(source, start=1):
                plain = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if plain.strip():
                    await places.acquire()
                    tasks.create_task(answer_one(plain, number))
    except ExceptionGroup as errors:  # all have one cause, such as a full disk
        raise errors.exceptions[0] from None
    return counts


class CustomIds:
    """The `custom_id`s of the lines so far, as digests: a file may have millions."""

    def __init__(self) -> None:
        self._lines: dict[bytes, int] = {}

    def add(self, name: str | None, number: int) -> None:
        """Raises LineError for an id that an earlier line has."""
        if name is None:
            return
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = self._lines.setdefault(digest, number)
        if first != number:
            raise LineError(
                f"custom_id={name[:100]!r}: line {first} has it already, use another in line "
                f"{number}"
            )


async def answer(
    application: Any, line: bytes, number: int, custom_ids: CustomIds
) -> tuple[dict[str, Any], int]:
    """Returns the output for a line, and its status."""
    custom_id = None
    try:
        custom_id = _name(line)
        custom_ids.add(custom_id, number)
        request = _request(line)
        status, body = await ask(application, request.url, bytes(request.body))
    except LineError as error:
        status = 400
        body = msgspec.json.encode(error_body(str(error), "invalid_request_error", code="line"))
    problem = None if status == 200 else msgspec.json.decode(body).get("error")
    response = {"status_code": status, "request_id": _id(), "body": msgspec.Raw(body)}
    return {"id": _id(), "custom_id": custom_id, "response": response, "error": problem}, status


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _name(line: bytes) -> str | None:
    """Returns the line's custom_id if it has one. Raises LineError for a line that is not a JSON
    object."""
    try:
        found = msgspec.json.decode(line, type=_Name).custom_id
    except (ValueError, RecursionError) as error:  # from msgspec and from decoding
        raise LineError(f"the line is not a JSON object: {error}") from error
    return found if isinstance(found, str) else None


def _request(line: bytes) -> Line:
    """Returns the line's request. Raises LineError for one that a batch does not support."""
    try:
        request = msgspec.json.decode(line, type=Line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"the line is not a request: {error}") from error
    if request.method != "POST":
        raise LineError(f"method={request.method!r}: use POST")
    if request.url not in PATHS:
        raise LineError(f"url={request.url!r}: use one of {', '.join(PATHS)}")
    try:
        is_stream = bool(msgspec.json.decode(request.body, type=_Stream).stream)
    except (ValueError, RecursionError):
        is_stream = False  # the application reports the error
    if is_stream:
        raise LineError("stream=true: a batch returns whole answers, leave it out")
    return request


async def ask(application: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Returns status and body of the application's response to a POST."""
    received = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, bytearray()

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await asyncio.Event().wait()  # the client never disconnects
        raise AssertionError("no event ever comes")

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    await application(scope, receive, send)
    return status, bytes(parts)
