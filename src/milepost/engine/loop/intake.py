"""Makes request groups from valid prompts. Queues nothing.

It also compiles a form when the first request needs it, and tokenizes bad words. Both may be called
from another thread.
"""

from __future__ import annotations

import uuid

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
from milepost.engine.loop.group import RequestGroup
from milepost.engine.prompts import Prompt
from milepost.engine.text import TokenTexts, detokenizer_for
from milepost.errors import InvalidRequestError
from milepost.kv_transfer_params import read
from milepost.pictures import group_ends
from milepost.sampling_params import SamplingParams
from milepost.scheduler.request import Request
from milepost.structured_outputs import StructuredOutputs

TURN_TOKENS = 32
"""Images with fewer tokens of text between them belong to one turn."""


class Intake:
    """Turns valid prompts into request groups, for one engine."""

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
