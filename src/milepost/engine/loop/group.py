"""The engine's side of a request: one prompt with its n completions; and how it is made from a
valid prompt.

A prompt with n > 1 becomes n requests of the scheduler, which share the prompt through the cache.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milepost.config import EngineConfig
from milepost.engine.assembly import EngineParts
from milepost.engine.constraints import (
    CompiledForm,
    FormGuide,
    Forms,
    Guide,
    Restriction,
    RuleBook,
    Rules,
    form_masks,
    has,
    vocabulary_of,
)
from milepost.engine.loop.completion import Completion
from milepost.engine.outputs import GrowingOutput, Output, Report, RequestOutput
from milepost.engine.prompts import Prompt
from milepost.engine.text import TokenTexts, detokenizer_for
from milepost.errors import EngineDeadError, InvalidRequestError
from milepost.kv_transfer_params import TransferWish, read
from milepost.pictures import group_ends
from milepost.sampling_params import SamplingParams
from milepost.scheduler.request import FinishReason, Request
from milepost.structured_outputs import StructuredOutputs


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
    _growing: GrowingOutput | None = None
    """The outputs that `output` has taken; None before its first call."""
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
        """Returns the completions so far, whole. Takes what `take_output` would return."""
        if self._growing is None:
            self._growing = GrowingOutput(str(self.number), self.prompt, self.params.n)
        self._growing.take(self.take_output())
        return self._growing.output()

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


TURN_TOKENS = 32
"""Images with fewer tokens of text between them belong to one turn."""


class Intake:
    """Turns valid prompts into request groups, for one engine. Queues nothing.

    It also compiles a form when the first request needs it, and tokenizes bad words. Both may be
    called from another thread.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts, texts: TokenTexts | None) -> None:
        self._config = config
        self._tokenizer = parts.tokenizer
        self._texts = texts
        self._limits = parts.limits
        self._end_token_ids = parts.end_token_ids
        drafts = config.speculative_config if parts.speculation is not None else None
        self._most_replayed = drafts.num_tokens if drafts is not None else 0
        self._chain = parts.scheduler.outside.cache.chain
        self._rules = RuleBook(parts.tokenizer, parts.limits.vocab_size, parts.end_token_ids)
        self.forms: Forms | None = None
        """The compiler of forms; None until a request has one."""
        self._num_groups = 0
        self._id = uuid.uuid4().hex

    def prepare(self, params: SamplingParams) -> CompiledForm | None:
        """Does the slow work on parameters: tokenizes bad words, and returns the compiled form, if
        there is one. Raises InvalidRequestError for parameters that cannot be enforced."""
        self._rules.rules_of(params)
        return self.form_of(params)

    def form_of(self, params: SamplingParams) -> CompiledForm | None:
        """Returns the form of the answers, compiled at its first use; None if any text will do.
        Raises InvalidRequestError for a form that cannot be enforced."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        if self.forms is None:
            if self._tokenizer is None:
                raise InvalidRequestError(f"{wanted.field}: no tokenizer is loaded")
            ends = tuple(self._end_token_ids)
            self.forms = Forms(vocabulary_of(self._tokenizer, self._limits.vocab_size, ends))
        form = self.forms.compile(wanted)
        self._check_beginning(wanted, form, self._rules.rules_of(params))
        return form

    def _check_beginning(
        self, wanted: StructuredOutputs, form: CompiledForm, rules: Rules | None
    ) -> None:
        """Raises InvalidRequestError if the restrictions exclude every token that a form can begin
        with."""
        if rules is None or rules.allowed is None:
            return
        after = wanted.starts_after
        if after is not None:
            begins = has(rules.allowed, after)
        else:
            guide = FormGuide(form, self._limits.vocab_size, self._end_token_ids, None)
            (mask,) = form_masks([guide])
            begins = mask is None or bool((mask & rules.allowed).any())
        if not begins:
            raise InvalidRequestError(
                f"{wanted.field}: {rules.names} exclude every token that it can begin with"
            )

    def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        number: int | None,
        priority: int,
        form: CompiledForm | None,
    ) -> RequestGroup:
        """Makes the group of a valid prompt, whose completions follow `form`. Raises
        InvalidRequestError for parameters that leave no token."""
        number = self._num_groups if number is None else number
        self._num_groups = max(self._num_groups, number + 1)
        wish = read(prompt.kv_transfer_params)
        group = RequestGroup(number=number, prompt=prompt, params=params, wish=wish)
        salt = self._salt(prompt, params, number)
        group.completions = [
            Completion(
                index=index,
                request=self._request(index, group, priority, salt),
                text=detokenizer_for(self._texts, params),
                seed=params.sample_seed(
                    index, engine_seed=self._config.seed, request_number=number
                ),
                guide=self._guide(prompt, params, form),
            )
            for index in range(params.n)
        ]
        return group

    def _salt(self, prompt: Prompt, params: SamplingParams, number: int) -> str:
        """Returns the salt. A prompt to be scored must be computed whole, so it gets a salt of its
        own, under which it hits nothing, here, in tiers or on other engines."""
        if params.prompt_logprobs is None:
            return prompt.cache_salt
        return f"{prompt.cache_salt}\0scored {number} by {self._id}"

    def _request(self, index: int, group: RequestGroup, priority: int, salt: str) -> Request:
        prompt, params = group.prompt, group.params
        tokens = prompt.packed[:-1] if group.prefills else prompt.packed
        room = self._limits.max_model_len - len(prompt.token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        asked = params.stop_token_ids or ()
        ends = () if params.ignore_eos else self._end_token_ids
        request = Request(
            id=f"{group.number}-{index}",
            chain=self._chain(tokens, salt, prompt.pictures),
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset((*asked, *ends)),
            marks=tuple(sorted({mark for mark in _marks_of(prompt) if mark <= len(tokens)})),
            priority=priority,
        )
        request.num_prompt_logprobs = params.prompt_logprobs if index == 0 else None
        request.is_bitwise = self._config.batch_invariant
        request.most_replayed = self._most_replayed if request.is_bitwise else 0
        request.keeps_history = params.has_penalties
        return request

    def _guide(
        self, prompt: Prompt, params: SamplingParams, form: CompiledForm | None
    ) -> Guide | None:
        rules = self._rules.rules_of(params)
        if form is None and rules is None:
            return None
        form_guide = None
        if form is not None:
            wanted = params.structured_outputs
            after = wanted.starts_after if wanted is not None else None
            form_guide = FormGuide(form, self._limits.vocab_size, self._end_token_ids, after)
        if rules is None:
            return Guide(form_guide, None)
        return Guide(form_guide, Restriction(rules, np.frombuffer(prompt.packed, np.uint32)))


def _marks_of(prompt: Prompt) -> list[int]:
    """Returns the positions where a state is worth keeping: the named ones, and the ends of the
    images of the last two turns."""
    ends = group_ends(prompt.pictures, least_apart=TURN_TOKENS, most=2)
    return [*prompt.cache_marks, *ends]
