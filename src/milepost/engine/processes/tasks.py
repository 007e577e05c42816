"""What the engine's process keeps for each request: its job, and how much of it was sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from milepost.engine.loop import Completion, RequestGroup
from milepost.engine.processes.wire import Delta, Output, Report


@dataclass(slots=True, eq=False)
class Sent:
    """How much of one answer the client has."""

    answer: Completion
    num_tokens: int = 0
    num_logprobs: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_over: bool = False

    def delta(self) -> Delta | None:
        """What the answer gained since the last call; None for nothing."""
        request = self.answer.request
        if self.is_over:
            return None
        tokens = request.chain.tokens[request.num_prompt_tokens + self.num_tokens :].tolist()
        reason = request.finish_reason
        if not tokens and reason is None:
            return None
        answer = self.answer
        num_drafts = answer.num_draft_tokens - self.num_draft_tokens
        num_accepted = answer.num_accepted_tokens - self.num_accepted_tokens
        self.num_tokens += len(tokens)
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.is_over = reason is not None
        return Delta(
            index=self.answer.index,
            text=self.answer.text.delta(),
            token_ids=tokens,
            logprobs=None if self.answer.logprobs is None else self._logprobs(),
            finish_reason=reason.value if reason is not None else None,
            stop_reason=self.answer.stop_reason,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=num_accepted,
        )

    def _logprobs(self) -> list:
        known = self.answer.logprobs or []
        new = known[self.num_logprobs :]
        self.num_logprobs = len(known)
        return new


@dataclass(slots=True, eq=False)
class Task:
    """A request of the client."""

    id: int
    job: RequestGroup
    sent: list[Sent] = field(default_factory=list)
    admitted_at: float | None = None
    has_report: bool = False
    has_scores: bool = False

    def output(self) -> Output:
        deltas = [delta for sent in self.sent if (delta := sent.delta()) is not None]
        report = None if self.has_report else self._report()
        self.has_report = self.has_report or report is not None
        first, scores = self.job.answers[0], None
        if not self.has_scores and first.request.num_output_tokens:
            scores, self.has_scores = first.prompt_logprobs, True
        return Output(
            id=self.id,
            deltas=deltas,
            finished=any(delta.finish_reason for delta in deltas) and self.job.is_finished,
            report=report,
            prompt_logprobs=scores,
            kv_transfer_params=self.job.kv_transfer_params,
        )

    def _report(self) -> Report | None:
        report = self.job.answers[0].request.report
        if report is None:
            return None
        return Report(
            prompt_tokens=report.prompt_tokens,
            kv_length=report.kv_length,
            state_length=report.state_length,
            reused=report.reused,
            lost={reason.value: count for reason, count in report.lost.items()},
            admitted_at=self.admitted_at or time.monotonic(),
            loaded=report.loaded,
        )
