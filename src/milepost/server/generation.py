"""One HTTP request on its way through the engine, with its metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from milepost.engine.outputs import Logprob
from milepost.engine.processes import Delta, Output, Report
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams
from milepost.server import transfer
from milepost.server.service import Service

PromptLogprobs = list[dict[int, Logprob] | None]


class Generation:
    """Submits prompts, and yields (choice index, delta) until all answers have ended. Without
    `is_counted` the usage does not include the answers.

    An answer also ends when `is_enough`, asked after each step, returns True for it. Tokens that
    the engine has made beyond that point depend on its load, so they are neither returned nor
    counted.

    Keeps the usage, the metrics and the access log's record. The constructor raises what
    `Service.submit` raises.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        scope: Mapping[str, Any],
        priority: int,
        field: str,
        is_enough: Callable[[int], bool] | None = None,
        is_counted: bool = True,
    ) -> None:
        self._service = service
        self._is_enough = is_enough
        self._is_counted = is_counted
        self._params = params
        self._record: dict[str, Any] = scope["milepost.record"]
        self._arrival: float = scope["milepost.arrival"]
        self._stream = service.submit(
            prompts,
            params,
            priority=priority,
            arrival=self._arrival,
            field=field,
            keeps_steps=is_enough is not None,
        )
        self.reports: list[Report] = []
        self._transfers: dict[int, transfer.Params] = {}
        """`kv_transfer_params` of the answers, by prompt."""
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        """Log-probabilities by prompt, where they were requested."""
        self.num_choices = len(prompts) * params.n
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_tokens = [0] * self.num_choices
        self._num_draft_tokens = self._num_accepted_tokens = 0
        self._ended: dict[int, str] = {}
        self._last_at: dict[int, float] = {}
        self._admitted_at: float | None = None
        self._first_at: float | None = None
        self._is_closed = False
        service.metrics.prompt_tokens.inc(self._num_prompt_tokens)
        service.metrics.asked_answers.observe(params.n)
        if params.max_tokens is not None:
            service.metrics.asked_tokens.observe(params.max_tokens)

    async def begun(self) -> None:
        """Wait until an answer begins, if requests that wait too long are refused: a response that
        has begun could not say so with its status."""
        if self._service.client.config.max_queue_wait_s is None:
            return
        try:
            await self._stream.begun()
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yields the deltas that have arrived, each time some have."""
        try:
            async for arrived in self._stream:
                yield [pair for number, output in arrived for pair in self._take(number, output)]
                if self._is_enough is not None:
                    yield self._end_enough(self._is_enough)
                    if len(self._ended) == self.num_choices:
                        return
        finally:
            self.close()

    def close(self) -> None:
        """Aborts answers that are not finished, and records the request. Call it in any case."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()
            self._close_record()

    def _end_enough(self, is_enough: Callable[[int], bool]) -> list[tuple[int, Delta]]:
        """Ends the answers that are complete enough; the engine is told when the streams are
        closed."""
        going = (index for index in range(self.num_choices) if index not in self._ended)
        enough = [index for index in going if is_enough(index)]
        for index in enough:
            self._ended[index] = "stop"
            self._service.metrics.requests.labels("stop").inc()
        return [(i, Delta(i % self._params.n, "", [], finish_reason="stop")) for i in enough]

    def _take(self, number: int, output: Output) -> list[tuple[int, Delta]]:
        now = time.monotonic()
        if output.report is not None:
            self.reports.append(output.report)
            waited = max(output.report.admitted_at - self._arrival, 0.0)
            self._service.metrics.queue_time.observe(waited)
            self._service.metrics.cached_tokens.inc(output.report.reused)
            self._admitted_at = min(output.report.admitted_at, self._admitted_at or now)
        if output.kv_transfer_params is not None:
            self._transfers[number] = output.kv_transfer_params
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[number] = output.prompt_logprobs
        self._time(number, now)
        deltas = []
        for delta in output.deltas:
            index = number * self._params.n + delta.index
            if index in self._ended:
                continue
            num_new = len(delta.token_ids)
            self._num_tokens[index] += num_new
            self._num_draft_tokens += delta.num_draft_tokens
            self._num_accepted_tokens += delta.num_accepted_tokens
            self._service.metrics.generation_tokens.inc(num_new)
            if delta.finish_reason is not None:
                self._ended[index] = delta.finish_reason
                self._service.metrics.requests.labels(delta.finish_reason).inc()
            if delta.finish_reason == "error":
                raise InvalidRequestError(str(delta.stop_reason))
            deltas.append((index, delta))
        return deltas

    def _time(self, number: int, now: float) -> None:
        metrics = self._service.metrics
        if self._first_at is None:
            self._first_at = now
            metrics.time_to_first_token.observe(now - self._arrival)
        elif number in self._last_at:
            metrics.inter_token.observe(now - self._last_at[number])
        self._last_at[number] = now

    def transfer(self) -> dict[str, Any]:
        """Returns the response's parameters for the other engine, if they were requested."""
        found = transfer.joined(self._transfers, self.num_choices // self._params.n)
        return {} if found is None else {"kv_transfer_params": found}

    def usage(self) -> dict[str, Any]:
        """Returns the `usage` of the response so far."""
        completion = sum(self._num_tokens) if self._is_counted else 0
        prompt = self._num_prompt_tokens
        drafts = {}
        if self._num_draft_tokens:
            accepted = self._num_accepted_tokens
            drafts["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self._num_draft_tokens - accepted,
            }
        loaded = _sums(report.loaded for report in self.reports)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(report.reused for report in self.reports),
                "lost_tokens": _sums(report.lost for report in self.reports),
                **({"loaded_tokens": loaded} if loaded else {}),
            },
            **drafts,
        }

    def _close_record(self) -> None:
        now = time.monotonic()
        metrics, num_tokens = self._service.metrics, sum(self._num_tokens)
        metrics.prompt_lengths.observe(self._num_prompt_tokens)
        if self._record.get("client_gone"):
            metrics.disconnects.inc()
        if len(self._ended) == self.num_choices:
            metrics.end_to_end.observe(now - self._arrival)
            for count in self._num_tokens:
                metrics.answer_lengths.observe(count)
            self._observe_phases()
        metrics.requests.labels("abort").inc(self.num_choices - len(self._ended))
        self._record.update(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_tokens,
            finish_reasons=[self._ended.get(i) for i in range(self.num_choices)],
            cached_tokens=sum(report.reused for report in self.reports),
            lost_tokens=_sums(report.lost for report in self.reports),
        )
        loaded = _sums(report.loaded for report in self.reports)
        if loaded:
            self._record["loaded_tokens"] = loaded
        if self._first_at is not None:
            self._record["ttft_s"] = round(self._first_at - self._arrival, 4)

    def _observe_phases(self) -> None:
        """Records the phases of a request whose answers have all ended."""
        metrics, longest = self._service.metrics, max(self._num_tokens)
        metrics.longest_answers.observe(longest)
        if self._first_at is None:
            return
        last_at = max(self._last_at.values())
        if longest > 1:
            metrics.time_per_output_token.observe((last_at - self._first_at) / (longest - 1))
        metrics.decode_time.observe(last_at - self._first_at)
        if self._admitted_at is not None:
            metrics.prefill_time.observe(max(self._first_at - self._admitted_at, 0.0))
            metrics.inference_time.observe(max(last_at - self._admitted_at, 0.0))


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of several counts, by name."""
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            if count:
                total[name] = total.get(name, 0) + count
    return total
