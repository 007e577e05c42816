"""The engine's side of a request: one prompt with its n completions.

A prompt with n > 1 becomes n requests of the scheduler, which share the prompt through the cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from milepost.engine.loop.completion import Completion
from milepost.engine.outputs import Output, Report, RequestOutput
from milepost.engine.prompts import Prompt
from milepost.errors import EngineDeadError
from milepost.kv_transfer_params import TransferWish
from milepost.sampling_params import SamplingParams
from milepost.scheduler.request import FinishReason


@dataclass(slots=True, kw_only=True, eq=False)
class RequestGroup:
    """One prompt with its completions, from `Engine.queue` until all have ended."""

    number: int
    """Number of the request, also on the wire; the client or the engine counts from 0."""
    prompt: Prompt
    params: SamplingParams
    completions: list[Completion] = field(default_factory=list)
    wish: TransferWish | None = None
    """The part of the prompt that other engines have or should get."""
    kv_transfer_params: dict[str, Any] | None = None
    """The fields for the engine that continues, once the request is over."""
    admitted_at: float | None = None
    """Time of the step that admitted it, in seconds of the monotonic clock."""
    loading_since: float | None = None
    """Time of the step that began to load the first completion's prompt, if one did."""
    _has_report: bool = False
    """Whether an earlier output contained the cache report."""
    _has_scores: bool = False
    """Whether an earlier output contained the prompt's log-probabilities."""

    @property
    def prefills(self) -> bool:
        """Whether only the prompt, without its last token, is computed, for another engine."""
        return self.wish is not None and self.wish.prefills and len(self.prompt.token_ids) > 1

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return None not in [each.request.finish_reason for each in self.completions]

    def check_whole(self) -> None:
        """Raises EngineDeadError if the engine was closed before all completions had ended."""
        reasons = [each.request.finish_reason for each in self.completions]
        if FinishReason.ABORT in reasons:
            raise EngineDeadError("the engine was closed before the answer had ended")

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of all completions so far."""
        return sum(each.request.num_output_tokens for each in self.completions)

    def output(self) -> RequestOutput:
        """Returns the completions so far, whole."""
        report = self.completions[0].request.report
        return RequestOutput(
            request_id=str(self.number),
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self.completions[0].prompt_logprobs,
            outputs=[each.output() for each in self.completions],
            finished=self.is_finished,
            num_cached_tokens=report.reused if report else 0,
            cache_report=report,
        )

    def take_output(self) -> Output:
        """Returns what the completions gained since the last call."""
        first, scores = self.completions[0], None
        deltas = [delta for each in self.completions if (delta := each.take_delta()) is not None]
        report = None if self._has_report else self._report()
        self._has_report = self._has_report or report is not None
        if not self._has_scores and first.request.num_output_tokens:
            scores, self._has_scores = first.prompt_logprobs, True
        return Output(
            number=self.number,
            deltas=deltas,
            finished=any(delta.finish_reason for delta in deltas) and self.is_finished,
            report=report,
            prompt_logprobs=scores,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _report(self) -> Report | None:
        report = self.completions[0].request.report
        if report is None:
            return None
        return Report(report, self.admitted_at or time.monotonic(), self.loading_since)
