"""Sends a chat request and parses its stream, noting when each piece arrived."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MAX_LINE = 2**24
"""Largest number of bytes of an event."""


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """The outcome of one request. Times are seconds of the given clock."""

    start: float
    first: float | None = None
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.finish_reason is not None


class Endpoint:
    """One server; `options` are sent with every request."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base_url: str,
        *,
        model: str,
        api_key: str | None,
        options: Mapping[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self._http = http
        self._url = f"{root_of(base_url)}/v1/chat/completions"
        self._model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._options = dict(options)
        self._clock = clock

    async def ask(self, messages: list[Mapping[str, Any]], max_tokens: int) -> RequestResult:
        """Sends a request. The result carries any error of the server or network; nothing is raised
        for it."""
        result = RequestResult(start=self._clock())
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        try:
            async with self._http.post(self._url, json=body, headers=self._headers) as response:
                if response.status != 200:
                    text = (await response.read()).decode(errors="replace")
                    result.error = f"{response.status}: {text[:200]}"
                else:
                    await self._read(response, result)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            result.error = reason_of(error)
        result.end = self._clock()
        if result.error is None and result.finish_reason is None:
            result.error = "the stream ended without a finish reason"
        return result

    async def _read(self, response: aiohttp.ClientResponse, result: RequestResult) -> None:
        """Reads server-sent events; lines without data (comments, names, ids) are skipped."""
        buffer = bytearray()
        async for piece in response.content.iter_any():
            buffer += piece
            *lines, rest = buffer.split(b"\n")
            buffer = bytearray(rest)
            if len(buffer) > MAX_LINE:
                raise ValueError(f"the server sent a line of more than {MAX_LINE} bytes")
            for line in lines:
                self._take_line(bytes(line), result)
        self._take_line(bytes(buffer), result)

    def _take_line(self, line: bytes, result: RequestResult) -> None:
        name, _, data = line.partition(b":")
        if name == b"data" and data.strip() not in (b"", b"[DONE]"):
            chunk = json.loads(data)
            try:
                self._take(chunk, result)
            except (AttributeError, TypeError) as error:
                what = f"the server sent what is no chunk: {str(chunk)[:40]!r}"
                raise ValueError(what) from error

    def _take(self, chunk: Any, result: RequestResult) -> None:
        if chunk.get("error"):
            result.error = str(chunk["error"])[:200]
            return
        result.usage = dict(chunk.get("usage") or result.usage)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if text:
                now = self._clock()
                result.first = result.first or now
                result.arrivals.append(now)
                result.text += text
            result.finish_reason = choice.get("finish_reason") or result.finish_reason


def reason_of(error: Exception) -> str:
    """Says why a request failed, and what to do about it if that is known."""
    match error:
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return (
                f"nobody listens on {error.host}:{error.port}: start a server, as with `milepost "
                "serve`, or name another with --base-url"
            )
        case TimeoutError():
            return "it took longer than --timeout-s"
    return f"{type(error).__name__}: {error}"


def root_of(base_url: str) -> str:
    """Returns the server's address without a trailing /v1, which other clients want."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


async def find_model(http: aiohttp.ClientSession, base_url: str, api_key: str | None) -> str:
    """Returns the first model that the server lists.

    Raises aiohttp.ClientError, or ValueError, LookupError or TypeError if the response is no list
    of models.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with http.get(f"{root_of(base_url)}/v1/models", headers=headers) as response:
        response.raise_for_status()
        name: str = (await response.json(content_type=None))["data"][0]["id"]
        return name
