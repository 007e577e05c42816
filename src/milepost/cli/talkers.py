"""Who answers in `milepost chat`: an engine in this process, or a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import IO, Any, Protocol

from milepost.cache import CacheReport, Lost
from milepost.cli.answers import CLOSING, OPENING
from milepost.cli.generate import SAMPLING, StreamingEngine
from milepost.engine.outputs import CompletionOutput, RequestOutput
from milepost.errors import ConfigError, InvalidRequestError
from milepost.logs import shown
from milepost.sampling_params import SamplingParams

MAX_LINE = 2**24
"""Largest number of bytes of an event, or of another answer."""
Said = Sequence[Mapping[str, Any]]


class Talker(Protocol):
    """Answers conversations. `given` holds the sampling parameters that were set, by name."""

    @property
    def name(self) -> str:
        """Name of the model."""

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Returns the parameters as far as they are known. Raises InvalidRequestError."""

    def stream(self, messages: Said, given: Mapping[str, Any]) -> Iterator[RequestOutput]:
        """Yields cumulative outputs. Raises InvalidRequestError."""

    def message(self, text: str) -> dict[str, Any]:
        """Returns the message with which a conversation goes on after an answer."""


@dataclass(frozen=True, slots=True)
class EngineTalker:
    """Answers with an engine in this process."""

    engine: StreamingEngine
    name: str

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        return replace(self.engine.get_default_sampling_params(), **{**SAMPLING.defaults, **given})

    def stream(self, messages: Said, given: Mapping[str, Any]) -> Iterator[RequestOutput]:
        return self.engine.stream_chat(messages, self.params(given))

    def message(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}


@dataclass(frozen=True, slots=True)
class ServerTalker:
    """Answers with a server that speaks OpenAI's API. It keeps its own defaults: only parameters
    that were set are sent."""

    url: str
    """Address of the server's API, which ends in /v1."""
    name: str
    key: str | None = None
    open: Callable[[urllib.request.Request], IO[bytes]] = urllib.request.urlopen

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(**{**SAMPLING.defaults, **given})

    def stream(self, messages: Said, given: Mapping[str, Any]) -> Iterator[RequestOutput]:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": self.name, "messages": messages, **given}
        body |= {"stream": True, "stream_options": options}
        answer = _ServerAnswer()
        with closing(_asked(self, "/chat/completions", body)) as response:
            for event in _events(response):
                try:
                    answer.take(event)
                    output = answer.output()
                except (AttributeError, KeyError, TypeError) as error:
                    raise _no_event(event) from error
                yield output
        if answer.finish_reason is None:
            raise InvalidRequestError(f"{self.url}: the server closed before its answer ended")

    def message(self, text: str) -> dict[str, Any]:
        thought, closing_tag, content = text.partition(CLOSING)
        if not closing_tag or not thought.startswith(OPENING):
            return {"role": "assistant", "content": text}
        reasoning = thought.removeprefix(OPENING).strip()
        return {"role": "assistant", "content": content.lstrip(), "reasoning_content": reasoning}


def reach(url: str, model: str | None, key: str | None) -> ServerTalker:
    """Finds a server and the model it serves. Raises ConfigError."""
    base = url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: use an address such as http://127.0.0.1:8000")
    base = base if base.endswith("/v1") else f"{base}/v1"
    talker = ServerTalker(base, model or "", key)
    try:
        with closing(_asked(talker, "/models")) as response:
            listed = json.loads(response.read(MAX_LINE))
            served = [str(entry["id"]) for entry in listed["data"]]
    except InvalidRequestError as error:
        raise ConfigError(f"--url {url}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException) as error:
        raise ConfigError(f"--url {url}: no list of models at {base}/models") from error
    if model is not None and model not in served:
        raise ConfigError(f"--model {model}: {url} serves {', '.join(served)}")
    if not served:
        raise ConfigError(f"--url {url}: it serves no model")
    return replace(talker, name=model or served[0])


def _asked(talker: ServerTalker, path: str, body: Mapping[str, Any] | None = None) -> IO[bytes]:
    """Returns an open response. Raises InvalidRequestError with the server's own words."""
    headers = {"content-type": "application/json"}
    if talker.key:
        headers["authorization"] = f"Bearer {talker.key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(talker.url + path, data=data, headers=headers)
    try:
        return talker.open(request)
    except urllib.error.HTTPError as error:
        raise InvalidRequestError(_said(error)) from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise InvalidRequestError(f"no server answers at {talker.url}: {reason}") from error


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return shown(json.loads(error.read(MAX_LINE))["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return f"the server answers {error.code} {shown(error.reason)}"


def _events(response: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yields a stream's events until its end. Raises InvalidRequestError for one with an error."""
    try:
        while line := response.readline(MAX_LINE):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                return
            yield _event(data)
    except (OSError, HTTPException) as error:
        raise InvalidRequestError(f"the connection broke: {error}") from error


def _event(data: bytes) -> dict[str, Any]:
    """Returns an event of a stream. Raises InvalidRequestError for an error, and for anything that
    is none."""
    try:
        event: dict[str, Any] = json.loads(data)
        problem = event.get("error")
    except (ValueError, AttributeError, RecursionError) as error:
        raise _no_event(data) from error
    if problem:
        said = problem.get("message", problem) if isinstance(problem, dict) else problem
        raise InvalidRequestError(shown(said))
    return event


def _no_event(said: object) -> InvalidRequestError:
    return InvalidRequestError(f"the server sent what is no event: {shown(said)[:80]}")


@dataclass(slots=True)
class _ServerAnswer:
    """An answer from a server, with what has arrived so far."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    num_pieces: int = 0
    finish_reason: str | None = None
    _is_thinking: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ())[:1]:
            delta = choice.get("delta") or {}
            self._think(delta.get("reasoning_content") or delta.get("reasoning") or "")
            self._say(delta.get("content") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _think(self, text: str) -> None:
        if text and not self._is_thinking:
            self.text += OPENING
            self._is_thinking = True
        self.text += text
        self.num_pieces += bool(text)

    def _say(self, text: str) -> None:
        if text and self._is_thinking:
            self.text += f"\n{CLOSING}\n\n"
            self._is_thinking = False
        self.text += text
        self.num_pieces += bool(text)

    def output(self) -> RequestOutput:
        """Returns the answer so far. Its token ids are not known: each is 0."""
        num_tokens = self._count("completion_tokens", self.num_pieces) if self.text else 0
        answer = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=[0] * num_tokens,
            finish_reason=self.finish_reason,
        )
        return RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=[0] * self._count("prompt_tokens", 0),
            outputs=[answer],
            finished=answer.finished,
            cache_report=self._report(),
        )

    def _count(self, name: str, unknown: int) -> int:
        """Returns a count of tokens that a server can have."""
        count = self.usage.get(name)
        return count if isinstance(count, int) and 0 <= count <= MAX_LINE else unknown

    def _report(self) -> CacheReport | None:
        """Returns the report of a server that gives reasons, as Milepost's does."""
        details = self.usage.get("prompt_tokens_details") or {}
        cached, lost = details.get("cached_tokens") or 0, details.get("lost_tokens")
        known = {reason.value for reason in Lost}
        if lost is None or not lost.keys() <= known:
            return None
        prompt = self.usage["prompt_tokens"]
        if cached + sum(lost.values()) != prompt:
            return None
        return CacheReport(
            prompt_tokens=prompt,
            kv_length=cached,
            state_length=cached,
            reused=cached,
            lost={Lost(reason): count for reason, count in lost.items()},
        )
