"""Engines on tiny random checkpoints, and what they have to answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from milepost import LLM, CompletionOutput, RequestOutput, SamplingParams
from milepost.engine.loop.core import Engine
from milepost.engine.loop.tiering import Tiering
from milepost.kernels.platform.tensors import FP8
from milepost.models import load_model
from milepost.runner.choice import SampledToken
from milepost.runner.sampling import SamplingRow, choose
from tests.batches import Part, build_pools
from tests.checkpoints import build, write
from tests.invariants import check

VOCAB_SIZE = 320
PAGE_SIZE = 64
NUM_TOKENS = 14
"""Length of the answers that are compared, if nothing else is said."""

Tokens = tuple[int, ...]


THREE_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
"""Enough to show what goes from one recurrent layer to the next, and to attention."""
WIDE_STATES = {**THREE_LAYERS, "linear_value_head_dim": 36}
"""The same with states no smaller than a page, so that both may lie in one memory."""


def tokens(num: int, seed: int = 0) -> list[int]:
    """A random prompt; those of different seeds share no prefix to speak of."""
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num)


def greedy(max_tokens: int | None = NUM_TOKENS, **options: Any) -> SamplingParams:
    """With the tokens' log-probabilities, which show what is too little to change a token."""
    return sampled(max_tokens, temperature=0, **options)


def sampled(max_tokens: int | None = NUM_TOKENS, **options: Any) -> SamplingParams:
    defaults = {"ignore_eos": True, "seed": 7, "logprobs": 0}
    return SamplingParams(max_tokens=max_tokens, **(defaults | options))


def open_llm(folder: Path, **options: Any) -> LLM:
    """An engine for token ids with little memory: one for pages and slots, unless their numbers are
    among the options, or pages are larger than the states.
    """
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "cpu_cache_gib": 0.02}
    if options.keys() & {"num_pages", "num_slots"}:
        defaults |= {"num_pages": 256, "num_slots": 32}
    elif options.get("page_size", PAGE_SIZE) <= PAGE_SIZE:
        defaults["cache_memory"] = "shared"
    return LLM(str(folder), **(defaults | options))


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token per row and read it."""
    return choose(logits, rows).read()


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


def ask_all(
    llm: LLM, prompts: Sequence[Sequence[int]], wishes: Sequence[SamplingParams]
) -> list[CompletionOutput]:
    """One answer to each prompt, each as it was wished for."""
    outputs = llm.generate([prompt(each) for each in prompts], wishes, use_tqdm=False)
    check(llm.llm_engine.scheduler.cache)
    return [output.outputs[0] for output in outputs]


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def answer(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids


def logprobs(completion: CompletionOutput) -> list[float]:
    """Of the tokens of an answer, each."""
    pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
    return [entry[token].logprob for token, entry in pairs]


def metric(llm: LLM, name: str, **labels: str) -> float:
    """Sum of the values under a name that have these labels."""
    found = [m for m in llm.get_metrics() if m.name == f"milepost:{name}"]
    return sum(m.value for m in found if labels.items() <= m.labels.items())


def steps_until_done(llm: LLM) -> Iterator[int]:
    """Run what is queued; returns the number of requests that run, after each step."""
    while llm.llm_engine.has_work:
        llm.llm_engine.step()
        yield len(llm.llm_engine.scheduler.running)


def num_held(llm: LLM) -> tuple[int, int]:
    """Pages and slots that requests hold."""
    cache = llm.llm_engine.scheduler.cache
    return cache.pages.num_used, cache.slots.num_used


@dataclass(slots=True)
class Tiny:
    """A checkpoint with what it has to answer, found in ways that have nothing in common."""

    folder: Path
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every engine."""
    _model: Any = None
    _engine: LLM | None = None
    _known: dict[Any, RequestOutput] = field(default_factory=dict)
    _right: dict[Any, list[SampledToken]] = field(default_factory=dict)

    def open(self, **options: Any) -> LLM:
        return open_llm(self.folder, **(self.options | options))

    def check(self, outputs: Iterable[RequestOutput], params: SamplingParams | None = None) -> None:
        """Every answer is what it has to be: the same tokens, as likely as they have to be.

        A causal model's answer is the one of which `chosen` returns every token, so an answer that
        is as long as it may be needs no other run.
        """
        params = params or greedy()
        for output in outputs:
            for completion in output.outputs:
                given = output.prompt_token_ids, params, completion.index
                if _ends_by_length(params):
                    assert len(completion.token_ids) == params.max_tokens
                    self._compare(completion, *given)
                else:
                    expected = self.cold(*given)
                    assert completion.token_ids == expected.token_ids
                    assert self._are_close(logprobs(completion), logprobs(expected))

    def _compare(
        self,
        completion: CompletionOutput,
        token_ids: Sequence[int],
        params: SamplingParams,
        index: int,
    ) -> None:
        """With what the bare model makes of prompt and answer."""
        key = (tuple(token_ids), repr(params), index)
        right = self._right.get(key)
        if right is None:
            right = self.chosen(token_ids, completion.token_ids, params, index)
        assert completion.token_ids == [each.token_id for each in right]
        assert self._are_close(logprobs(completion), [each.logprob for each in right])
        self._right[key] = right

    def expected(
        self, token_ids: Sequence[int], params: SamplingParams, index: int = 0
    ) -> list[int]:
        """The tokens of the answer."""
        return self.cold(token_ids, params, index).token_ids

    def cold(
        self, token_ids: Sequence[int], params: SamplingParams, index: int = 0
    ) -> CompletionOutput:
        """By an engine that keeps nothing, on two pools, once the bare model agrees."""
        self.learn([token_ids], [params])
        return self._known[tuple(token_ids), repr(params)].outputs[index]

    def learn(self, prompts: Sequence[Sequence[int]], wishes: Sequence[SamplingParams]) -> None:
        """Has `cold` and `expected` know the answers to all of these from a single run."""
        pairs = zip(prompts, wishes, strict=True)
        asked = {(tuple(token_ids), repr(wish)): wish for token_ids, wish in pairs}
        new = {key: wish for key, wish in asked.items() if key not in self._known}
        if not new:
            return
        if self._engine is None:
            self._engine = self.open(enable_prefix_caching=False, cache_memory="split")
        given = [prompt(token_ids) for token_ids, _ in new]
        outputs = self._engine.generate(given, list(new.values()), use_tqdm=False)
        check(self._engine.llm_engine.scheduler.cache)
        for (key, wish), output in zip(new.items(), outputs, strict=True):
            assert output.num_cached_tokens == 0
            for completion in output.outputs:
                self._compare(completion, output.prompt_token_ids, wish, completion.index)
            self._known[key] = output

    def _are_close(self, left: list[float], right: list[float]) -> bool:
        """Up to the rounding of matrix products of different shapes."""
        bound = 1e-9 if self.dtype == torch.float64 else 1e-3
        pairs = zip(left, right, strict=True)
        return all(abs(a - b) < bound for a, b in pairs)

    def chosen(
        self, token_ids: Sequence[int], found: list[int], params: SamplingParams, index: int = 0
    ) -> list[SampledToken]:
        """What follows each prefix of prompt and answer, of a single pass over both.

        A causal model's answer is the one of which this returns every token.
        """
        logits = self.logits([*token_ids, *found[:-1]], len(token_ids) - 1)
        rows = [self._row(token_ids, found[:num], params, index) for num in range(len(found))]
        return sample(logits, rows)

    def loop(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Without any engine: the model computes the whole prefix again for every token."""
        found: list[int] = []
        while len(found) < params.max_tokens:
            logits = self.logits([*token_ids, *found], -1)
            found.append(sample(logits, [self._row(token_ids, found, params, 0)])[0].token_id)
        return found

    def logits(self, token_ids: Sequence[int], start: int = 0) -> torch.Tensor:
        """[tokens from `start`, vocabulary], in one pass over pools of its own."""
        if self._model is None:
            self._model, _ = load_model(self.folder)
        pages = list(range(-(-len(token_ids) // PAGE_SIZE)))
        kv_dtype = FP8 if "kv_cache_dtype" in self.options else None
        pools = build_pools(self._model, num_pages=len(pages), num_slots=2, kv_dtype=kv_dtype)
        part = Part(pages=pages, start=0, length=len(token_ids), slot_in=0, slot_out=1)
        hidden = self._model(torch.tensor(token_ids), pools.context([part]))
        return self._model.compute_logits(hidden[start:])

    def _row(
        self, token_ids: Sequence[int], found: list[int], params: SamplingParams, index: int
    ) -> SamplingRow:
        return SamplingRow(
            params=params,
            tokens=[*token_ids, *found],
            num_prompt_tokens=len(token_ids),
            seed=params.sample_seed(index, engine_seed=0, request_number=0),
        )


def _ends_by_length(params: SamplingParams) -> bool:
    """Whether nothing but `max_tokens` ends an answer."""
    is_open = params.max_tokens is None or not params.ignore_eos
    return not (is_open or params.stop or params.stop_token_ids or params.structured_outputs)


def save_tiny(folder: Path, name: str, dtype: torch.dtype, **changes: Any) -> Tiny:
    """Save a checkpoint whose logits are far from flat and whose states remember long ago: decays
    as they are drawn at random forget within a few tokens, and no wrong state would ever show.
    """
    model = build(name, dtype, **(_DEFAULTS | changes))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("dt_bias") and name.startswith("bailing_hybrid"):
            torch.nn.init.uniform_(parameter, -12, -8)  # decays with a bound
        elif parameter_name.endswith("A_log") and not name.startswith("bailing_hybrid"):
            torch.nn.init.uniform_(parameter, -9, -5)
    write(model, name, folder)
    return Tiny(folder, dtype)


_DEFAULTS = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 65536,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
}


def tiering_of(engine: Engine) -> Any:
    """The tiers of an engine, if it has any."""
    return next((part for part in engine.off_device if isinstance(part, Tiering)), None)
