"""Logits of an engine beside those of one pass, wherever a prefill or an answer resumes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from milepost import LLM
from milepost.errors import UnsupportedModelError
from milepost.models import LoadOptions, load_model
from milepost.tiers.holdings import MeasuredRates
from tests.engines import answer, ask, cached, greedy, logprobs, open_llm, tiering_of, tokens
from tests.numbers import relative_error


@dataclass
class Resuming:
    """An engine, and the model that it has to agree with."""

    llm: LLM
    expect: Callable[[list[int]], torch.Tensor]
    """Logits [tokens, vocabulary] of tokens that come all at once."""
    max_error: float = 1e-4
    """Relative, of what it is to agree with."""
    _seen: list[torch.Tensor] = field(default_factory=list)
    """Logits of the rows that sampled, step by step."""

    @classmethod
    def beside(cls, llm: LLM, model: PreTrainedModel) -> Resuming:
        """Beside transformers' own logits."""

        @torch.no_grad()
        def expect(token_ids: list[int]) -> torch.Tensor:
            return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

        return cls(llm, expect)

    def run(self, token_ids: list[int], num_cached: int) -> list[int]:
        """Answer, resuming at `num_cached`, with logits as they should be; returns prompt and
        answer."""
        self._seen.clear()
        executor = type(self.llm.llm_engine.runner.executor)
        with mock.patch.object(executor, "sample", self._noting(executor.sample)):
            (output,) = ask(self.llm, token_ids, params=greedy(5))
        assert cached([output]) == [num_cached]
        whole = [*token_ids, *answer(output)]
        expected = self.expect(whole)
        assert expected.std() > 0.3, "flat logits would show nothing"
        rows = slice(len(token_ids) - 1, -1)
        assert relative_error(torch.cat(self._seen), expected[rows]) < self.max_error
        return whole

    def run_through_slots(self) -> None:
        """Every place that a model with states in slots resumes from: for an engine of 96 tokens a
        step, pages of 16 tokens and chunks of 64."""
        history = self.run(tokens(200), 0)  # in chunks, then decodes
        self.run(tokens(200), 192)  # a page
        self.run([*history, *tokens(30, 1)], 204)  # the answer's end, inside a page
        shared = tokens(83, 2)
        self.run([*shared, *tokens(40, 3)], 0)
        self.run([*shared, *tokens(40, 4)], 64)  # where the first prefill was cut
        self.run([*shared, *tokens(40, 5)], 83)  # the branch point, inside a page

    def run_through_pages(self) -> None:
        """Likewise for a model whose states lie beside pages."""
        history = self.run(tokens(200), 0)  # in chunks, then decodes
        self.run(tokens(200), 192)  # the last page
        self.run([*history, *tokens(30, 1)], 192)  # an answer's end lies inside a page
        self.run(tokens(192), 176)  # whose state is shared and is not written again
        self.run(tokens(33), 32)  # one token
        shared = tokens(83, 2)
        self.run([*shared, *tokens(40, 3)], 0)
        self.run([*shared, *tokens(40, 4)], 80)
        self.run([*shared, *tokens(40, 4)], 112)

    def _noting(self, sample):
        def note(executor, flight, rows):
            self._seen.append(flight.logits.float().cpu())
            sample(executor, flight, rows)

        return note


def answer_from_host_memory(folder: Path) -> None:
    """A prompt that comes back from host memory is answered as it was before."""
    llm = open_llm(folder, num_slots=8, num_pages=16, cache_host_gib=0.05)
    (cold,) = ask(llm, tokens(300), params=greedy(6))
    assert llm.llm_engine.scheduler.cache.reset()
    tiering_of(llm.llm_engine).tiers.holdings.rates = MeasuredRates(tokens_per_s=1.0, load_s=0.0)
    (again,) = ask(llm, tokens(300), params=greedy(6))
    assert sum(again.cache_report.loaded.values()) > 0
    assert answer(again) == answer(cold)


def answer_with_drafts(folder: Path, num_tokens: int, **wanted: Any) -> LLM:
    """Answers with drafts are those without them: cold, and resumed at a page and inside one.
    Returns the engine that drafts."""
    wanted |= {"adaptive": False}
    drafting = open_llm(folder, num_slots=32, speculative_config=wanted)
    plain, params = open_llm(folder, num_slots=32), greedy(num_tokens)
    history = tokens(150)
    for _ in range(3):
        outputs = [ask(llm, history, tokens(40, 1), params=params) for llm in (drafting, plain)]
        found, expected = ([answer(each) for each in own] for own in outputs)
        assert found == expected
        assert cached(outputs[0]) == cached(outputs[1])
        history = [*history, *found[0], *tokens(30, 2)]
    return drafting


ALL_ACCEPTED: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [1.0, 1.0, 1.0],
}


def resume_behind_drafts(drafting: LLM, plain: LLM, *, max_error: float) -> None:
    """Checks that a turn after an answer that ends with drafts, all accepted, resumes behind them
    and answers as a cold run."""
    vocabulary = range(drafting.llm_engine.limits.vocab_size)  # whatever is said is found there
    for num_tokens in range(5, 9):
        prompt = [*vocabulary, num_tokens]
        (first,) = ask(drafting, prompt, params=greedy(num_tokens))
        turn = [*prompt, *answer(first), 9, 10]
        (found,), (cold,) = (ask(llm, turn, params=greedy(1)) for llm in (drafting, plain))
        assert found.num_cached_tokens > len(prompt)
        assert answer(found) == answer(cold)
        assert abs(logprobs(found.outputs[0])[0] - logprobs(cold.outputs[0])[0]) < max_error
    assert drafting.llm_engine.scheduler.stats.num_accepted_tokens > 0


def configure(folder: Path, **changes: Any) -> None:
    """Changes settings of a checkpoint's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refuse(folder: Path, named: str, **changes: Any) -> None:
    """With these settings a checkpoint is refused by name."""
    configure(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(folder, LoadOptions(load_format="dummy"))
