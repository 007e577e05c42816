"""Images in the bitwise mode, drawn: each token's log-probabilities are those of a cold run alone,
bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from milepost import LLM, SamplingParams
from tests.pictured_prompts import asked, image, open_llm

NUM_PROMPTS = 7


def draw_prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Prompts of which each begins as an earlier one does, and goes on with images and text."""
    pictures = [image(rng.randint(2, 9), rng.randint(2, 9), seed) for seed in range(4)]
    known: list[list[Any]] = [[]]
    for _ in range(NUM_PROMPTS):
        base = rng.choice(known)
        own = [rng.choice([rng.randint(1, 90), rng.choice(pictures)]) for _ in range(3)]
        known.append([*base[: rng.randint(0, len(base))], *own, rng.randint(1, 40)])
    return [asked(*parts) for parts in known[1:]]


def bits(llm: LLM, prompts: list[dict[str, Any]], wishes: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, wishes, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def check_bits(seed: int, folder: Path, **options: Any) -> None:
    """Asks for everything twice, with little memory."""
    rng = random.Random(seed)
    prompts = draw_prompts(rng)
    wishes = [
        SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            logprobs=2,
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(NUM_PROMPTS)
    ]
    options = {"batch_invariant": True, "max_model_len": 640, **options}
    with open_llm(folder, enable_prefix_caching=False, **options) as llm:
        pairs = zip(prompts, wishes, strict=True)
        alone = [bits(llm, [prompt], [wish])[0] for prompt, wish in pairs]
    little = {
        "num_pages": 12,
        "num_slots": rng.choice([4, 9]),
        "encoder_cache_size": rng.choice([240, 400]),
        "cache_host_gib": rng.choice([None, 0.02]),
        "max_num_batched_tokens": rng.choice([70, 130]),
        "speculative_config": rng.choice([None, {"method": "ngram", "num_speculative_tokens": 3}]),
    }
    with open_llm(folder, **options, **little) as llm:
        for _ in range(2):
            assert bits(llm, prompts, wishes) == alone
        assert llm.llm_engine.scheduler.stats.num_encoded


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), ("bfloat16", 1)])
def test_bits(dtype, seed, folder):
    check_bits(seed, folder, dtype=dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 30))
def test_many_bits(seed, folder):
    check_bits(seed, folder, dtype=random.Random(seed).choice(["float32", "bfloat16"]))
