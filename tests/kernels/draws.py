"""Rows to sample, of every kind, and a sampler for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from milepost.runner.sampler import Sampler
from milepost.runner.sampling import SamplingRow, choose
from milepost.sampling_params import SamplingParams

WISHES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "all": {},
    "cold": {"temperature": 1e-300},
    "top_k": {"top_k": 3},
    "top_k of one": {"top_k": 1},
    "top_k of many": {"top_k": 150, "temperature": 2.0},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-9},
    "wide top_p": {"top_p": 0.9999999, "temperature": 3.0},
    "min_p": {"min_p": 0.1},
    "narrow min_p": {"min_p": 1.0},
    "recommended": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "all at once": {"temperature": 1.3, "top_p": 0.7, "top_k": 40, "min_p": 0.01},
    "min_p and top_p": {"top_p": 0.97, "min_p": 0.2, "temperature": 1.5},
}
PENALTIES: list[dict[str, float]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.4, "presence_penalty": -0.5},
]


def make_rows(
    vocab_size: int, seed: int, wishes: Sequence[str] = tuple(WISHES)
) -> list[SamplingRow]:
    """One for each wish, with penalties, biases, suppressed ids and masks, or without."""
    rng = random.Random(seed)
    return [_row(vocab_size, rng, WISHES[wish]) for wish in wishes]


def _row(vocab_size: int, rng: random.Random, wish: dict[str, float]) -> SamplingRow:
    def ids(num: int) -> list[int]:
        return rng.choices(range(vocab_size), k=num)

    values = [rng.uniform(-4, 4), -100]
    bias = {token: rng.choice(values) for token in ids(rng.choice([0, 0, 5]))}
    options = wish | rng.choice(PENALTIES) | ({"logit_bias": bias} if bias else {})
    mask = None
    if rng.random() < 0.3:
        flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        flags[ids(max(vocab_size // 3, 2))] = 1
        mask = np.packbits(flags, bitorder="little").view(np.int32)
    prompt, answer = ids(9), ids(rng.choice([0, 6]))
    return SamplingRow(
        params=SamplingParams(**options),
        seed=rng.getrandbits(64),
        tokens=[*prompt, *answer, *answer[:2]],
        num_prompt_tokens=len(prompt),
        suppressed_ids=sorted(set(ids(rng.choice([0, 0, 3])))),
        mask=mask,
    )


def make_logits(num_rows: int, vocab_size: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Some flat, some steep; in half precision many are equal, and some are in float32 too."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-2, 1.2, num_rows).unsqueeze(1)
    logits = scales * torch.randn(num_rows, vocab_size, generator=generator) + 3
    logits[:, vocab_size // 2] = logits[:, vocab_size // 3]
    logits[:, 1] = -torch.inf
    return logits.to(dtype)


def sampler_for(logits: Tensor, num_rows: int | None = None) -> Sampler:
    return Sampler(num_rows or len(logits), logits.shape[1], logits.device)


def drawn(
    sampler: Sampler, logits: Tensor, rows: Sequence[SamplingRow], ids: Sequence[str] = ()
) -> list[int]:
    ids = ids or [f"{id(sampler)}-{row}" for row in range(len(rows))]
    best = logits.argmax(-1)
    return sampler.choose(ids, logits, best, rows).tolist()


def defined(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    known = [replace(row, num_ahead=0) for row in rows]
    return [token.token_id for token in choose(logits.cpu(), known).read()]
