"""Logits of an engine beside transformers' own, wherever a prefill or an answer resumes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import torch
from transformers import PreTrainedModel

from milepost import LLM
from milepost.runner.plain import PlainExecutor
from tests.engines import answer, ask, cached, greedy, tokens
from tests.numbers import relative_error


@dataclass
class Resuming:
    """An engine, and the model that it has to agree with."""

    llm: LLM
    reference: PreTrainedModel
    _seen: list[torch.Tensor] = field(default_factory=list)
    """Logits of the rows that sampled, step by step."""

    def run(self, token_ids: list[int], num_cached: int) -> list[int]:
        """Answer, resuming at `num_cached`, with logits as they should be; returns prompt and
        answer."""
        self._seen.clear()
        with mock.patch.object(PlainExecutor, "sample", self._noting()):
            (output,) = ask(self.llm, token_ids, params=greedy(5))
        assert cached([output]) == [num_cached]
        whole = torch.tensor([[*token_ids, *answer(output)]])
        with torch.no_grad():
            expected = self.reference(input_ids=whole, use_cache=False).logits[0]
        assert expected.std() > 0.3, "flat logits would show nothing"
        rows = slice(len(token_ids) - 1, -1)
        assert relative_error(torch.cat(self._seen), expected[rows]) < 1e-4
        return [*whole[0].tolist()]

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

    def _noting(self):
        sample = PlainExecutor.sample

        def note(executor, flight, rows):
            self._seen.append(flight.logits.clone())
            sample(executor, flight, rows)

        return note
