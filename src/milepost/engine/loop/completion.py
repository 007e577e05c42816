"""One completion of a request: what may be sampled next, the tokens it has, and where it ends.

A stop string, a stop token, a form or a length may end it in the middle of the tokens of a step:
`Completion.take` returns those that belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from milepost.engine.constraints import Guide, Mask, masks_along, without
from milepost.engine.outputs import Delta, Logprob, token_logprobs
from milepost.engine.text import Detokenizer, TokenTexts
from milepost.runner.choice import PromptScores, SampledToken
from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import SamplingPlan
from milepost.scheduler.request import FinishReason, Request


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """One of a group's n answers: the scheduler's request, and the tokens that it has received."""

    index: int
    request: Request
    text: Detokenizer
    seed: int
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities of the prompt once it is computed, if they were asked for; None for the
    first token."""
    stop_reason: int | str | None = None
    guide: Guide | None = None
    """Constrains the answer to its form and to the other restrictions."""
    ending: FinishReason | None = None
    """The finish reason if its text or its form has ended it; the scheduler does not know of
    that."""
    dead_end: FinishReason | None = None
    """The finish reason if no token is allowed next; the token being sampled is then dropped. None
    while some token is allowed."""
    num_left_out: int = 0
    """Number of tokens that were sampled at a dead end and dropped; the index of later samplings
    includes them."""
    num_draft_tokens: int = 0
    """Number of drafts that were verified."""
    num_accepted_tokens: int = 0
    """Number of verified drafts that were accepted."""
    _num_taken: tuple[int, int, int] = (0, 0, 0)
    """Numbers of tokens, drafts and accepted drafts in earlier deltas."""
    _is_over: bool = False
    """Whether its last delta was taken."""
    _num_known: int | None = None
    """Number of tokens in the current run that were sampled under the form's masks;
    None for all."""

    def waits_for(self, num_tokens: int, params: SamplingParams, *, counts_are_kept: bool) -> bool:
        """Whether the next token can be sampled only once the host knows the last `num_tokens`.
        With `counts_are_kept` the device counts tokens for penalties.
        """
        if params.has_penalties and not counts_are_kept:
            return True
        return self.guide is not None and self.guide.waits_for(num_tokens)

    def samplings(
        self, params: SamplingParams, *, drafts: Sequence[int], mask: Mask | None
    ) -> Iterator[SamplingPlan]:
        """Yields the sampling of the next token and of one after each draft; `mask` is the next
        one's."""
        along = masks_along(self.guide, drafts, mask)
        after = range(1, len(along))
        ends = (n for n in after if self.is_dead_end(params, along[n], num_after=n))
        along = along[: next(ends, len(along))]
        self._num_known = len(along)
        for num in range(1 + len(drafts)):
            next_mask = along[num] if num < len(along) else None
            yield self.sampling(params, mask=next_mask, num_after=num, num_drafts=len(drafts))

    def sampling(
        self,
        params: SamplingParams,
        *,
        mask: Mask | None,
        num_ahead: int = 0,
        num_after: int = 0,
        num_drafts: int = 0,
    ) -> SamplingPlan:
        """Returns the sampling of a token: `num_ahead` tokens before it are not known yet, and
        `num_after` of its `num_drafts` drafts precede it.
        """
        request = self.request
        index = request.num_output_tokens + self.num_left_out + num_ahead + num_after
        return SamplingPlan(
            number=request.number,
            params=params,
            seed=self.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            index=index,
            num_ahead=num_ahead,
            num_drafts=num_drafts,
            suppressed_ids=self._suppressed(params, index),
            mask=None if mask is None else mask.tobytes(),
        )

    def _suppressed(self, params: SamplingParams, index: int) -> tuple[int, ...]:
        """Returns the tokens that may not be chosen yet, since they would end the answer."""
        return tuple(sorted(self.request.stop_token_ids)) if index < params.min_tokens else ()

    def is_dead_end(self, params: SamplingParams, mask: Mask | None, *, num_after: int = 0) -> bool:
        """Whether a mask allows no token, `num_after` tokens after the next one."""
        if mask is None:
            return False
        suppressed = self._suppressed(params, self.request.num_output_tokens + num_after)
        return not (without(mask, suppressed) if suppressed else mask).any()

    def note_dead_end(self, params: SamplingParams) -> None:
        """Ends the answer because no token may come next. The token being sampled is left out."""
        assert self.guide is not None, "some token may come of all"
        if self.guide.may_end:
            self.dead_end = FinishReason.STOP
            return
        self.dead_end = FinishReason.ERROR
        assert params.structured_outputs is not None, "an answer without a form may end anywhere"
        why = self.guide.problem or f"nothing is left of it beside {self.guide.names}"
        self.stop_reason = f"{params.structured_outputs.field}: {why}"

    def take(
        self,
        run: Sequence[SampledToken],
        params: SamplingParams,
        texts: TokenTexts | None,
    ) -> list[int]:
        """Takes the tokens that were sampled after the answer. Returns those that belong to it: up
        to its end, and to the first that its form does not allow.
        """
        run, self._num_known = run[: self._num_known], None
        token_ids = [sampled.token_id for sampled in run]
        num_tokens, reason = self.request.cut(token_ids)
        if run and reason is None and self.guide is None and run[0].logprob is None:
            return self._take_text(token_ids)  # most often
        for index, sampled in enumerate(run[:num_tokens]):
            if index and self.guide is not None and not self.guide.allows(sampled.token_id):
                return token_ids[:index]
            is_last = index + 1 == num_tokens
            self.ending = self._take(sampled, params, texts, reason if is_last else None)
            if self.ending is not None:
                return token_ids[: index + 1]
        return token_ids[:num_tokens]

    def _take_text(self, token_ids: list[int]) -> list[int]:
        """Adds tokens to the text only. Returns those up to the one that completes a
        stop string."""
        for num, token_id in enumerate(token_ids, start=1):
            stop = self.text.append(token_id)
            if stop is not None:
                self.stop_reason, self.ending = stop, FinishReason.STOP
                return token_ids[:num]
        return token_ids

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Records how many of its drafts were verified and accepted."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    def _take(
        self,
        sampled: SampledToken,
        params: SamplingParams,
        texts: TokenTexts | None,
        reason: FinishReason | None,
    ) -> FinishReason | None:
        """Takes one token. Returns the finish reason if its text or the form ends the answer there;
        `reason` is given if the scheduler ends it."""
        token_id = sampled.token_id
        if sampled.logprob is not None:
            self._add_logprobs(sampled, texts)
        if reason is FinishReason.STOP and token_id in (params.stop_token_ids or ()):
            self.stop_reason = token_id
        if self.guide is not None:
            self.guide.accept(token_id)
            if reason is not FinishReason.LENGTH and self.guide.problem:
                # Too complex to follow: what there is of the answer is none.
                assert params.structured_outputs is not None, "a guide with a problem has a form"
                self.stop_reason = f"{params.structured_outputs.field}: {self.guide.problem}"
                self.text.flush()
                return FinishReason.ERROR
        stop = self._add_text(token_id, reason)
        if stop is None:
            return None
        self.stop_reason = stop
        return FinishReason.STOP

    def _add_text(self, token_id: int, reason: FinishReason | None) -> str | None:
        """Adds a token to the text. Returns the stop string that it completes, if any."""
        if reason is FinishReason.STOP:
            self.text.append_stop(token_id)
            return None
        stop = self.text.append(token_id)
        if stop is None and reason is not None:
            self.text.flush()
        return stop

    def _add_logprobs(self, sampled: SampledToken, texts: TokenTexts | None) -> None:
        """Records the token's log-probabilities."""
        assert sampled.logprob is not None, "likelihoods were asked for"
        likely = sampled.logprob, sampled.rank, sampled.top_logprobs or {}
        text_of = texts.alone if texts is not None else lambda _: None
        entry = token_logprobs(sampled.token_id, *likely, text_of)
        if self.logprobs is None:
            self.logprobs = []
        self.logprobs.append(entry)

    def add_prompt_scores(self, scores: PromptScores) -> None:
        """Records the log-probabilities of a chunk of the prompt. A chunk that is computed again
        has the same."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None] * self.request.num_prompt_tokens
        for position, token in enumerate(scores.tokens, start=scores.start):
            assert token.logprob is not None, "scores have log-probabilities"
            top = token.top_logprobs or {}
            entry = token_logprobs(token.token_id, token.logprob, token.rank, top)
            self.prompt_logprobs[position] = entry

    def take_delta(self) -> Delta | None:
        """Returns the tokens and text gained since the last call, or None if there are none."""
        tokens, drafts, accepted = self._num_taken
        request = self.request
        new = request.chain.tokens[request.num_prompt_tokens + tokens :].tolist()
        reason = request.finish_reason
        if self._is_over or not (new or reason):
            return None
        self._num_taken = tokens + len(new), self.num_draft_tokens, self.num_accepted_tokens
        self._is_over = reason is not None
        return Delta(
            index=self.index,
            text=self.text.delta(),
            token_ids=new,
            logprobs=None if self.logprobs is None else self.logprobs[tokens : tokens + len(new)],
            finish_reason=reason.value if reason is not None else None,
            stop_reason=self.stop_reason,
            num_draft_tokens=self.num_draft_tokens - drafts,
            num_accepted_tokens=self.num_accepted_tokens - accepted,
        )
