"""One HTTP request on its way through the engine, and the response of choices that chats and
completions answer with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from milepost.engine.outputs import Logprob
from milepost.engine.processes import Delta, Output
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.server import transfer
from milepost.server.observers import MetricsObserver, RequestTally
from milepost.server.protocol import Sampling
from milepost.server.service import Service
from milepost.server.stream import DONE, encoded, event
from milepost.server.tracing import TraceContext

PromptLogprobs = list[dict[int, Logprob] | None]


class Generation:
    """Submits prompts, and yields (choice index, delta) until all answers have ended. Without
    `is_counted` the usage does not include the answers.

    An answer also ends when `is_enough`, asked after each step, returns True for it. Tokens that
    the engine has made beyond that point depend on its load, so they are neither returned nor
    counted. The constructor raises what `Service.submit` raises.
    """

    def __init__(
        self,
        service: Service,
        request: Sampling,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        scope: Mapping[str, Any],
        field: str,
        is_enough: Callable[[int], bool] | None = None,
        is_counted: bool = True,
    ) -> None:
        self._is_enough = is_enough
        self._is_counted = is_counted
        self._num_each = params.n
        self._may_be_late = service.client.config.max_queue_wait_s is not None
        arrival, record = scope["milepost.arrival"], scope["milepost.record"]
        if request.user is not None:
            record["user"] = request.user
        self._stream = service.submit(
            prompts,
            params,
            priority=request.priority or 0,
            arrival=arrival,
            field=field,
            keeps_steps=is_enough is not None,
        )
        self._transfers: dict[int, transfer.Params] = {}
        """`kv_transfer_params` of the answers, by prompt."""
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        """Log-probabilities by prompt, where they were requested."""
        self.num_choices = len(prompts) * params.n
        self._tally = RequestTally(prompts, params, arrival, record)
        self._metrics = MetricsObserver(service.metrics, params, self._tally)
        self._short_prompts = service.short_prompts
        self._params, self._span = params, scope["milepost.span"]
        self._trace: TraceContext | None = scope["milepost.trace"]
        if self._span is not None:
            for prompt in prompts:
                self._span.link(prompt.kv_transfer_params)
        self._is_closed = False

    async def begun(self) -> None:
        """Waits until an answer begins, if the server refuses requests that wait too long. Once a
        response has begun, its status can no longer say so."""
        if not self._may_be_late:
            return
        try:
            await self._stream.begun()
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Yields the deltas that have arrived, each time some have."""
        try:
            async for arrived in self._stream:
                yield [pair for number, output in arrived for pair in self._take(number, output)]
                if self._is_enough is not None:
                    yield self._end_enough(self._is_enough)
                    if self._tally.is_whole:
                        return
        finally:
            self.close()

    def close(self) -> None:
        """Aborts answers that are not finished, and ends the record. Call it in any case."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()
            self._tally.closed()
            self._metrics.closed()
            if self._span is not None:
                self._span.generated(self._params, self._tally)

    def _end_enough(self, is_enough: Callable[[int], bool]) -> list[tuple[int, Delta]]:
        """Ends the answers that are complete for the client. The engine is told when the streams
        are closed."""
        ended = self._tally.ended
        enough = [i for i in range(self.num_choices) if i not in ended and is_enough(i)]
        num = self._num_each
        return self._extend([(i, Delta(i % num, "", [], finish_reason="stop")) for i in enough])

    def _take(self, number: int, output: Output) -> list[tuple[int, Delta]]:
        self._tally.received(number, output)
        self._metrics.received(output)
        if output.report is not None:
            self._short_prompts.note(output.report)
        if output.kv_transfer_params is not None:
            self._transfers[number] = output.kv_transfer_params
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[number] = output.prompt_logprobs
        first, ended = number * self._num_each, self._tally.ended
        deltas = [(first + delta.index, delta) for delta in output.deltas]
        if ended:
            deltas = [(index, delta) for index, delta in deltas if index not in ended]
        return self._extend(deltas)

    def _extend(self, deltas: list[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
        """Tells the observers of deltas, and returns them. Raises InvalidRequestError for an answer
        that the engine could not continue."""
        self._tally.extended(deltas)
        self._metrics.extended(deltas)
        if self._tally.problem:
            raise InvalidRequestError(self._tally.problem)
        return deltas

    def transfer(self) -> dict[str, Any]:
        """Returns the response's parameters for the other engine, if they were requested."""
        found = transfer.joined(self._transfers, self.num_choices // self._num_each)
        if found is None:
            return {}
        trace = {} if self._trace is None else {"traceparent": self._trace.traceparent}
        return {"kv_transfer_params": {**found, **trace}}

    def usage(self) -> dict[str, Any]:
        """Returns the `usage` of the response so far."""
        return self._tally.usage(is_counted=self._is_counted)


class ChoicesWriter(ABC):
    """Writes a response whose answers are `choices`."""

    event_object: str
    """The `object` of a stream's events."""

    def __init__(
        self, service: Service, request: Sampling, generation: Generation, id_: str, model: str
    ) -> None:
        self._service = service
        self._generation = generation
        self._options = request.stream_options
        self.id = id_
        self._model = model
        self._created = int(time.time())
        self._begun: set[int] = set()
        """Choices that the response has begun."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            **self._service.fingerprint,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of a stream, and the usage if it was requested. Events differ only in
        their choice, so everything around it is encoded once."""
        options, is_forced = self._options, self._service.config.enable_force_include_usage
        has_usage = is_forced or bool(options and options.include_usage)
        has_all_usage = has_usage and bool(options and options.continuous_usage_stats)
        head = self._head(self.event_object)
        before = b"data: " + encoded(head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        async with aclosing(self._generation.deltas()) as arrived:
            async for several in arrived:
                choices = [choice for pair in several for choice in self._choices(*pair)]
                if choices and has_all_usage:
                    after = b'],"usage":' + encoded(self._usage()) + b"}\n\n"
                if choices:
                    yield b"".join(before + encoded(choice) + after for choice in choices)
            last = event({**head, "choices": [], "usage": self._usage()}) if has_usage else b""
            yield last + DONE

    @abstractmethod
    def _choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the choices to send for a delta."""

    def _usage(self) -> dict[str, Any]:
        return self._generation.usage()
