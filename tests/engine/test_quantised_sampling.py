"""Quantised checkpoints in memory that is too small, sampled as model cards recommend: what comes
from the cache, with neighbours and behind preemptions, is what a cold engine answers alone.

In float64: in float32 a rounding that falls the other way is a rounding of float8 as well, and
samples another token now and then.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from milepost import LLM, SamplingParams
from tests.engines import metric, open_llm
from tests.quantised import EXPERTS, write

NUM_PROMPTS = 8
COMMON = {
    "dtype": "float64",
    "skip_tokenizer_init": True,
    "max_model_len": 400,
    "max_num_batched_tokens": 96,
    "page_size": 16,
    "cache_memory": "split",
}
TIGHT = {"max_num_seqs": 6, "num_pages": 26, "num_slots": 10}
ROOMY = {"max_num_seqs": 1, "num_pages": 100, "num_slots": 16, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    "form",
    [
        "int8-channels",
        "awq",
        *(pytest.param(form, marks=pytest.mark.nightly) for form in ("fp8-blocks", "nvfp4")),
    ],
)
def test_sampled_answers_do_not_depend_on_the_cache(form: str, tmp_path: Path) -> None:
    folder, _ = write("qwen3_5_moe", tmp_path, form, **EXPERTS)
    cold, tight = open_llm(folder, **COMMON, **ROOMY), open_llm(folder, **COMMON, **TIGHT)
    prompts = _prompts(cold.llm_engine.limits.vocab_size)
    expected = [_ask(cold, [prompt], [own])[0] for prompt, own in zip(prompts, PARAMS, strict=True)]
    for _ in range(2):
        assert _ask(tight, prompts, PARAMS) == expected
    assert metric(tight, "num_preemptions") > 0
    assert metric(tight, "prefix_cache_hits") > 0
    assert metric(cold, "prefix_cache_hits") == 0


PARAMS = [
    SamplingParams(
        temperature=1.0 if n % 2 else 0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.05 * (n % 3),
        presence_penalty=1.5 * (n % 2),
        repetition_penalty=1.05,
        seed=n,
        n=1 + (n % 4 == 3),
        max_tokens=12 + 4 * n,
        ignore_eos=True,
        detokenize=False,
    )
    for n in range(NUM_PROMPTS)
]


def _prompts(vocab_size: int) -> list[list[int]]:
    """Some behind a short system prompt, some behind a long one, and one that goes on with
    another's."""
    rng = random.Random(1)
    tokens = lambda num: rng.choices(range(5, vocab_size), k=num)  # noqa: E731
    systems = tokens(40), tokens(130)
    own = [[*systems[n % 2], *tokens(rng.randrange(3, 90))] for n in range(NUM_PROMPTS)]
    own[4] = [*own[2], *tokens(3)]
    return own


def _ask(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    """The token ids of each prompt's answers."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]
