"""Joins the outputs of one request: for a slow reader, and for `AsyncLLM`, which returns all of
them."""

from __future__ import annotations

from milepost.engine.outputs import CompletionOutput, Delta, Output, RequestOutput
from milepost.engine.prompts import Prompt


class GrowingOutput:
    """All of a request's outputs so far."""

    def __init__(self, request_id: str, prompt: Prompt, num_answers: int) -> None:
        self._request_id, self._prompt, self._num_answers = request_id, prompt, num_answers
        self._whole: Output | None = None
        self._is_aborted = False

    @property
    def is_finished(self) -> bool:
        """Whether all answers have ended."""
        return self._is_aborted or (self._whole is not None and self._whole.finished)

    def take(self, output: Output) -> None:
        """Takes an output that has arrived."""
        self._whole = output if self._whole is None else joined(self._whole, output)

    def abort(self) -> None:
        """Ends the answers that have not ended."""
        self._is_aborted = not self.is_finished

    def output(self) -> RequestOutput:
        """Returns the answers so far."""
        whole = self._whole
        deltas = {} if whole is None else {delta.index: delta for delta in whole.deltas}
        report = None if whole is None else whole.report
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[
                self._completion(deltas.get(index) or Delta(index, "", []))
                for index in range(self._num_answers)
            ],
            finished=self.is_finished,
            prompt_logprobs=None if whole is None else whole.prompt_logprobs,
            num_cached_tokens=0 if report is None else report.reused,
            cache_report=None if report is None else report.cache_report(),
        )

    def _completion(self, delta: Delta) -> CompletionOutput:
        total = None
        if delta.logprobs is not None:
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            total = sum(entry[token].logprob for token, entry in pairs)
        return CompletionOutput(
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            cumulative_logprob=total,
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason or ("abort" if self._is_aborted else None),
            stop_reason=delta.stop_reason,
            num_draft_tokens=delta.num_draft_tokens,
            num_accepted_tokens=delta.num_accepted_tokens,
        )


def joined(first: Output, second: Output) -> Output:
    """Returns two outputs of one request as one."""
    deltas = {delta.index: delta for delta in first.deltas}
    for delta in second.deltas:
        known = deltas.get(delta.index)
        deltas[delta.index] = delta if known is None else _joined_delta(known, delta)
    return Output(
        number=first.number,
        deltas=list(deltas.values()),
        finished=second.finished,
        report=first.report or second.report,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        kv_transfer_params=first.kv_transfer_params or second.kv_transfer_params,
    )


def _joined_delta(first: Delta, second: Delta) -> Delta:
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *second.logprobs]
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        num_draft_tokens=first.num_draft_tokens + second.num_draft_tokens,
        num_accepted_tokens=first.num_accepted_tokens + second.num_accepted_tokens,
    )
