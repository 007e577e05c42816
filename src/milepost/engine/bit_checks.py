"""Answers the same prompts in several ways and compares the bits: what `milepost verify` runs.

The ways are those in which a state can come back and a step can differ: hits, batches, chunks,
preemptions, drafts, a restart. The answers that others are compared with are to one prompt at a
time, under a salt of its own, so that nothing comes from the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milepost.config import EngineConfig
from milepost.engine.llm import LLM
from milepost.engine.outputs import RequestOutput
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.sampling_params import SamplingParams

OpenLLM = Callable[[EngineConfig], LLM]
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
NUM_LIKELIEST = 5
"""Number of tokens per position whose log-probabilities are compared, besides the sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSize:
    """The amount of traffic that is compared."""

    num_prompts: int = 8
    prompt_tokens: int = 700
    """Length of the longest prompt."""
    max_tokens: int = 32
    """Length of each answer."""

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 2), ("prompt_tokens", 130), ("max_tokens", 2)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}={value}: use {least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WayResult:
    """The outcome of one way of answering the prompts."""

    way: str
    num_cached: int = 0
    """Number of prompt tokens that came from the cache."""
    num_tokens: int = 0
    """Number of tokens that were compared."""
    num_different: int = 0
    """Number of tokens that differ, or whose log-probabilities differ in any bit."""
    note: str = ""


class BitChecks:
    """Compares the answers of engines of one configuration. `directory` is for what outlives an
    engine."""

    def __init__(
        self, config: EngineConfig, size: CheckSize, directory: str, open_llm: OpenLLM
    ) -> None:
        self._size = size
        self._open = open_llm
        wanted = replace(config, speculative_config=None, disable_log_stats=True)
        self._config = wanted if wanted.has_tiers else replace(wanted, cache_dir=directory)
        self._rng = random.Random(0)
        self._params = [
            SamplingParams(
                max_tokens=size.max_tokens,
                temperature=float(index % 2),
                seed=index,
                logprobs=NUM_LIKELIEST,
                ignore_eos=True,
                detokenize=False,
            )
            for index in range(size.num_prompts)
        ]
        self._prompts: list[list[int]] = []
        self._expected: list[RequestOutput] = []
        self._grid = self._num_alone = 0

    def run(self) -> Iterator[WayResult]:
        """Yields the outcome of each way. Raises what opening an engine raises."""
        with self._open(self._config) as llm:
            yield from self._in_one_engine(llm)
        with self._open(self._config) as llm:
            yield self._compare("after a restart", self._ask(llm, "turns"))
        yield from self._elsewhere("in small chunks and little memory", self._small())
        yield from self._elsewhere("with drafts", self._unkept(speculative_config=DRAFTS))

    def _in_one_engine(self, llm: LLM) -> Iterator[WayResult]:
        self._grid = llm.llm_engine.scheduler.cache.grid
        self._prompts = self._draw(llm)
        self._expected = self._alone(llm)
        yield self._compare("alone", self._expected)
        yield self._compare("one after the other", self._one_by_one(llm, "one"))
        yield self._compare("one after the other, again", self._one_by_one(llm, "one"))
        yield self._compare("all at once", self._ask(llm, "turns"))
        yield self._compare("all at once, again", self._ask(llm, "turns"))
        self._prompts = [
            [*each.prompt_token_ids, *each.outputs[0].token_ids, *self._tokens(llm, 20)]
            for each in self._expected
        ]
        next_turns = self._ask(llm, "turns")
        self._expected = self._alone(llm)
        yield self._compare("as a chat's next turn", next_turns)
        yield self._compare("as a chat's next turn, again", self._ask(llm, "turns"))

    def _elsewhere(self, way: str, config: EngineConfig) -> Iterator[WayResult]:
        """Compares answers of another engine, opened with `config`, unless the model does not allow
        it."""
        try:
            with self._open(config) as llm:
                outputs = [*self._ask(llm, "a"), *self._ask(llm, "a")]
                num = llm.llm_engine.scheduler.stats.num_preemptions
                drafts = llm.llm_engine.scheduler.stats.num_accepted_tokens
        except UnsupportedModelError as error:
            yield WayResult(way=way, note=f"left out: {error}")
            return
        found = self._compare(way, outputs, [*self._expected, *self._expected])
        counts = {"preemptions": num, "accepted drafts": drafts}
        note = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        yield replace(found, note=note)

    # --- engines ----------------------------------------------------------------------------------

    def _unkept(self, **changes: Any) -> EngineConfig:
        """Returns the configuration without a directory, with these changes."""
        return replace(self._config, cache_dir=None, **changes)

    def _small(self) -> EngineConfig:
        """Returns changes for small steps, and for a memory that holds few requests."""
        longest = max(map(len, self._prompts)) + self._size.max_tokens
        num_pages = -(-3 * longest // (2 * self._config.page_size)) + 1
        return self._unkept(
            max_num_batched_tokens=self._grid + 6,
            max_num_seqs=6,
            max_model_len=longest,
            num_pages=num_pages,
            num_slots=8,
            kv_cache_memory_bytes=None,
            cache_memory="split",
        )

    # --- prompts and answers ----------------------------------------------------------------------

    def _draw(self, llm: LLM) -> list[list[int]]:
        """Returns prompts that share a prefix and end on both sides of the grid."""
        size, rng = self._size, self._rng
        room = llm.llm_engine.limits.max_model_len - 2 * size.max_tokens - 20
        longest = min(size.prompt_tokens, room)
        if longest < 2 * self._grid + 2:
            raise ConfigError(
                f"prompt_tokens={size.prompt_tokens}, max_tokens={size.max_tokens}: a prompt of "
                f"{longest} tokens is too short to be cut; raise max_model_len or prompt_tokens"
            )
        shared = self._tokens(llm, longest // 3)
        lengths = [rng.randint(len(shared) + 1, longest) for _ in range(size.num_prompts)]
        on_grid = longest - longest % self._grid
        lengths[:2] = [on_grid, on_grid + 1 - self._grid]
        return [[*shared, *self._tokens(llm, length)][:length] for length in lengths]

    def _tokens(self, llm: LLM, num: int) -> list[int]:
        return self._rng.choices(range(llm.llm_engine.limits.vocab_size), k=num)

    def _alone(self, llm: LLM) -> list[RequestOutput]:
        self._num_alone += 1
        salts = [f"alone {self._num_alone} {index}" for index in range(len(self._prompts))]
        return self._one_by_one(llm, *salts)

    def _one_by_one(self, llm: LLM, *salts: str) -> list[RequestOutput]:
        prompts = self._salted(*salts)
        pairs = zip(prompts, self._params, strict=True)
        return [llm.generate([each], params, use_tqdm=False)[0] for each, params in pairs]

    def _ask(self, llm: LLM, salt: str) -> list[RequestOutput]:
        return llm.generate(self._salted(salt), self._params, use_tqdm=False)

    def _salted(self, *salts: str) -> list[dict[str, Any]]:
        """Returns the prompts under these salts, or all under one."""
        given = salts if len(salts) > 1 else salts * len(self._prompts)
        return [
            {"prompt_token_ids": prompt, "cache_salt": salt}
            for prompt, salt in zip(self._prompts, given, strict=True)
        ]

    def _compare(
        self,
        way: str,
        outputs: Sequence[RequestOutput],
        expected: Sequence[RequestOutput] | None = None,
    ) -> WayResult:
        pairs = list(zip(outputs, expected or self._expected, strict=True))
        return WayResult(
            way=way,
            num_cached=sum(output.num_cached_tokens for output in outputs),
            num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            num_different=sum(num_different(left, right) for left, right in pairs),
        )


def num_different(output: RequestOutput, expected: RequestOutput) -> int:
    """Returns how many tokens of an answer differ from the expected one, or have other
    log-probabilities. After the first different token, all count as different."""
    left, right = output.outputs[0], expected.outputs[0]
    entries = zip(left.logprobs or (), right.logprobs or (), strict=False)
    wrong = [index for index, (a, b) in enumerate(entries) if a != b]
    tokens = zip(left.token_ids, right.token_ids, strict=False)
    parted = next((index for index, (a, b) in enumerate(tokens) if a != b), len(left.token_ids))
    return sum(index < parted for index in wrong) + len(left.token_ids) - parted
