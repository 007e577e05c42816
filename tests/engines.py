"""Engines on tiny random checkpoints, and what they have to answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from milepost import LLM, RequestOutput, SamplingParams
from milepost.cache.check import check
from milepost.models import load_model
from milepost.runner.sampling import SamplingRow, sample
from tests.batches import Part, build_pools
from tests.checkpoints import save

VOCAB_SIZE = 320
PAGE_SIZE = 64
NUM_TOKENS = 20
"""Length of the answers that are compared, if nothing else is said."""

Tokens = tuple[int, ...]


def tokens(num: int, seed: int = 0) -> list[int]:
    """A random prompt; those of different seeds share no prefix to speak of."""
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num)


def greedy(max_tokens: int = NUM_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def sampled(max_tokens: int = NUM_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **({"seed": 7} | options))


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine for token ids with small pools."""
    return LLM(
        str(folder),
        **{"skip_tokenizer_init": True, "num_pages": 256, "num_slots": 32, **options},
    )


def prompt(token_ids: Sequence[int], **options: Any) -> dict[str, Any]:
    return {"prompt_token_ids": list(token_ids), **options}


def ask(
    llm: LLM, *prompts: Sequence[int], params: SamplingParams | None = None, **options: Any
) -> list[RequestOutput]:
    """Answers to prompts that come at once, with every invariant of the cache checked after them.

    `options` are the prompts' own, such as `cache_salt`.
    """
    given = [prompt(token_ids, **options) for token_ids in prompts]
    outputs = llm.generate(given, params or greedy(), use_tqdm=False)
    check(llm.llm_engine.scheduler.cache)
    return outputs


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def answer(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids


def metric(llm: LLM, name: str, **labels: str) -> float:
    """Sum of the values under a name that have these labels."""
    found = [m for m in llm.get_metrics() if m.name == f"milepost:{name}"]
    return sum(m.value for m in found if labels.items() <= m.labels.items())


def steps_until_done(llm: LLM) -> Iterator[int]:
    """Run what is queued; gives the number of requests that run, after each step."""
    while llm.llm_engine.has_work:
        llm.llm_engine.step()
        yield len(llm.llm_engine.scheduler.running)


def num_held(llm: LLM) -> tuple[int, int]:
    """Pages and slots that requests hold."""
    cache = llm.llm_engine.scheduler.cache
    return cache.pages.num_used, cache.slots.pool.num_used


@dataclass(slots=True)
class Tiny:
    """A checkpoint with what it has to answer, found in ways that have nothing in common."""

    folder: Path
    _model: Any = None
    _cold: LLM | None = None
    _known: dict[Any, list[int]] = field(default_factory=dict)

    def open(self, **options: Any) -> LLM:
        return open_llm(self.folder, **options)

    def expected(
        self, token_ids: Sequence[int], params: SamplingParams, index: int = 0
    ) -> list[int]:
        """The answer of an engine without a cache to this prompt alone, once the model agrees."""
        key = (tuple(token_ids), repr(params), index)
        if key not in self._known:
            cold = self.cold(token_ids, params, index)
            assert cold == self.chosen(token_ids, cold, params, index), "a cold engine errs"
            self._known[key] = cold
        return self._known[key]

    def cold(self, token_ids: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
        """By an engine that keeps nothing, one prompt at a time."""
        if self._cold is None:
            self._cold = self.open(enable_prefix_caching=False)
        (output,) = ask(self._cold, token_ids, params=params)
        assert output.num_cached_tokens == 0
        return answer(output, index)

    def chosen(
        self, token_ids: Sequence[int], cold: list[int], params: SamplingParams, index: int = 0
    ) -> list[int]:
        """What follows each prefix of prompt and answer, of a single pass over both.

        A causal model's answer is the one of which this gives every token.
        """
        logits = self.logits([*token_ids, *cold[:-1]])[len(token_ids) - 1 :]
        rows = [self._row(token_ids, cold[:num], params, index) for num in range(len(cold))]
        return [token.token_id for token in sample(logits, rows)]

    def loop(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Without any engine: the model computes the whole prefix again for every token."""
        found: list[int] = []
        while len(found) < params.max_tokens:
            logits = self.logits([*token_ids, *found])[-1:]
            found.append(sample(logits, [self._row(token_ids, found, params, 0)])[0].token_id)
        return found

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary], in one pass over pools of its own."""
        if self._model is None:
            self._model, _ = load_model(self.folder)
        pages = list(range(-(-len(token_ids) // PAGE_SIZE)))
        pools = build_pools(
            self._model.layer_specs, self._model.dtype, num_pages=len(pages), num_slots=2
        )
        part = Part(pages=pages, start=0, length=len(token_ids), slot_in=0, slot_out=1)
        hidden = self._model(torch.tensor(token_ids), pools.context([part]))
        return self._model.compute_logits(hidden)

    def _row(
        self, token_ids: Sequence[int], found: list[int], params: SamplingParams, index: int
    ) -> SamplingRow:
        return SamplingRow(
            params=params,
            prompt_token_ids=list(token_ids),
            output_token_ids=list(found),
            seed=params.sample_seed(index, engine_seed=0, request_number=0),
        )

    def check(self, outputs: Sequence[RequestOutput], params: SamplingParams | None = None) -> None:
        """Every answer is what it has to be."""
        params = params or greedy()
        for output in outputs:
            for completion in output.outputs:
                expected = self.expected(output.prompt_token_ids, params, completion.index)
                assert completion.token_ids == expected


def save_tiny(folder: Path, name: str, dtype: torch.dtype, **changes: Any) -> Tiny:
    """Save a checkpoint whose logits are far from flat."""
    defaults = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 65536}
    save(name, folder, dtype, **(defaults | changes))
    return Tiny(folder)
