"""The outputs of requests, as vLLM users know them, and the origin of each prompt token.

Plain values: no tokenizer, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from milepost.cache import CacheReport

if TYPE_CHECKING:
    from milepost.engine.prompts import Prompt


class Logprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The log-probability of one token. There are many, so they are cheap to create and untracked
    by the garbage collector."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str | None = None
    """The text of the token; None without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt, so far."""

    index: int
    """Index of this answer among the request's n."""
    text: str
    """Empty without a tokenizer, or with `detokenize=False`."""
    token_ids: list[int]
    """Tokens of the answer, with the stop token that ended it, if one did."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities, if they were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log-probabilities of each token and of the likeliest others in its place, if they were asked
    for."""
    finish_reason: str | None = None
    """`stop`: the model or a stop condition ended it; `length`: max_tokens or max_model_len;
    `error`: its form could not be followed to the end."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None if the model ended it. For an error, its
    message."""
    num_draft_tokens: int = 0
    """Number of drafts that were verified."""
    num_accepted_tokens: int = 0
    """Number of verified drafts that were accepted."""

    @property
    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt, so far."""

    request_id: str
    """Counted from 0 by each engine."""
    prompt: str | None
    """None if the prompt came as token ids."""
    prompt_token_ids: Sequence[int]
    """All of them, those from the cache too."""
    outputs: list[CompletionOutput]
    """One for each of the n answers."""
    finished: bool
    """Whether all of them have ended."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities of each prompt token but the first, if they were asked for; without
    texts."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the cache."""
    cache_report: CacheReport | None = None
    """None until the request was admitted."""


def token_logprobs(
    token_id: int,
    logprob: float,
    rank: int | None,
    top_logprobs: Mapping[int, float],
    text_of: Callable[[int], str | None] = lambda _: None,
) -> dict[int, Logprob]:
    """Returns one token's entry of `CompletionOutput.logprobs`: the chosen token first, then the
    likeliest."""
    entry = {token_id: Logprob(logprob=logprob, rank=rank, decoded_token=text_of(token_id))}
    for place, (other, value) in enumerate(top_logprobs.items(), start=1):
        if other != token_id:
            entry[other] = Logprob(logprob=value, rank=place, decoded_token=text_of(other))
    return entry


class Report(msgspec.Struct, frozen=True):
    """A request's cache report, and the time of its admission in seconds of the monotonic clock.
    For a request loaded from outside the device, that is the time when everything had arrived."""

    cache: CacheReport
    admitted_at: float
    loading_since: float | None = None
    """When its load began, if it was loaded."""


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """Tokens that one completion gained, in one step or several."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Number of verified drafts that were accepted."""


class Output(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that a request gained, in one step or several. `report` and `prompt_logprobs` come
    once, with the first, and `kv_transfer_params` with the last, for the engine that continues."""

    number: int
    deltas: list[Delta]
    finished: bool
    report: Report | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


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
        report = None if whole is None or whole.report is None else whole.report.cache
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
            cache_report=report,
        )

    def _completion(self, delta: Delta) -> CompletionOutput:
        total = None
        if delta.logprobs is not None:
            total = sum(next(iter(entry.values())).logprob for entry in delta.logprobs)
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
    """Joins two consecutive outputs of one request."""
    deltas = {delta.index: delta for delta in first.deltas}
    for delta in second.deltas:
        known = deltas.get(delta.index)
        deltas[delta.index] = delta if known is None else _joined_delta(known, delta)
    return Output(
        number=first.number,
        deltas=list(deltas.values()),
        finished=first.finished or second.finished,
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
