"""Computes log-probabilities of prompt tokens for requests that ask, chunk by chunk of the prefill.

The logits of a chunk are computed a few rows at a time, so their memory does not grow with the
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milepost.runner.choice import SampledToken, full, likeliest
from milepost.scheduler.plans import PromptScoring, StepPlan

PIECE_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Scores of a request's prompt tokens from position `start` on."""

    number: int
    """Number of the request."""
    start: int
    tokens: list[SampledToken]


def wants_scores(plan: StepPlan) -> bool:
    """Whether a sequence of the plan has prompt tokens to be scored."""
    return any(sequence.scoring is not None for sequence in plan.sequences)


@torch.inference_mode()
def score_prompts(
    plan: StepPlan, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
) -> list[PromptScores]:
    """Scores the prompts of all sequences that ask for it; `hidden` [T, features] is the whole
    step's. Waits for the device."""
    scores, first = [], 0
    for sequence in plan.sequences:
        if sequence.scoring is not None:
            tokens = list(_score(sequence.scoring, hidden, first, compute_logits))
            start = sequence.start + 1
            scores.append(PromptScores(number=sequence.number, start=start, tokens=tokens))
        first += sequence.num_tokens
    return scores


def _score(
    scoring: PromptScoring,
    hidden: Tensor,
    first: int,
    compute_logits: Callable[[Tensor], Tensor],
) -> Iterator[SampledToken]:
    targets = np.frombuffer(scoring.targets, np.dtype("<u4")).tolist()
    for start in range(0, len(targets), PIECE_ROWS):
        piece = targets[start : start + PIECE_ROWS]
        logits = compute_logits(hidden[first + start : first + start + len(piece)])
        logprobs = full(logits).log_softmax(dim=-1)
        chosen = logprobs.gather(1, torch.tensor(piece, device=logits.device)[:, None])
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        best, best_ids = likeliest(logprobs, scoring.num_top)
        columns = (chosen[:, 0], ranks, best_ids, best)
        rows = zip(piece, *(column.tolist() for column in columns), strict=True)
        for token_id, logprob, rank, ids, values in rows:
            yield SampledToken(token_id, logprob, dict(zip(ids, values, strict=True)), rank)
