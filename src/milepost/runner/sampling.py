"""Chooses the next token of every sequence from its logits: the reference.

A row's token depends on its logits, its parameters, its tokens so far and (seed, number of tokens
so far). Nothing is carried from one step to the next and rows do not affect each other, so
preemption, batching and cache hits do not change a sampled answer. Operations follow vLLM's order:
suppressed ids, logit_bias, penalties, the output constraint, temperature, min_p, top_k, top_p; of
the remaining tokens the one with the largest logit plus Gumbel noise wins. `runner.sampler` does
the same on a GPU.

Legend: R rows, V vocabulary, W words of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.sampling import gumbel, lowest_kept
from milepost.runner.choice import Choice, choice_of, full, tensor_beside
from milepost.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """The inputs to the choice of one sequence's next token, besides its logits."""

    params: SamplingParams
    seed: int
    """The sample's own seed (`SamplingParams.sample_seed`)."""
    tokens: Sequence[int]
    """The prompt and the answer so far; without penalties only their number counts."""
    num_prompt_tokens: int
    suppressed_ids: Sequence[int] = ()
    """Ids that may not be chosen now: those that end an answer, while it is below min_tokens."""
    mask: np.ndarray | None = None
    """[W] int32, the tokens that the output constraint allows now: bit i of word w is token 32 w +
    i."""
    num_ahead: int = 0
    """Number of answer tokens that are chosen but not known yet."""

    @property
    def index(self) -> int:
        """Index of the draw: the number of answer tokens before it."""
        return len(self.tokens) - self.num_prompt_tokens + self.num_ahead

    @property
    def takes_the_best(self) -> bool:
        """Whether the row takes the likeliest token, without a draw."""
        return self.params.is_greedy or self.params.top_k == 1

    @property
    def is_adjusted(self) -> bool:
        """Whether anything but the temperature changes its logits."""
        return bool(
            self.suppressed_ids
            or self.params.logit_bias
            or self.params.has_penalties
            or self.mask is not None
        )


def are_plain(rows: Sequence[SamplingRow]) -> bool:
    """Whether every row takes the best of its unchanged logits."""
    return all(row.takes_the_best and not row.is_adjusted for row in rows)


@torch.inference_mode()
def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Choice:
    """Chooses one token per row of `logits` [R, V] (any float type; not modified). Costs one argmax
    if every row is greedy and needs no adjustment."""
    assert logits.shape[0] == len(rows), "one row of logits per sampling row"
    adjusted = _adjusted(logits, rows)
    token_ids = _best(adjusted)
    drawn = [r for r, row in enumerate(rows) if not row.takes_the_best]
    if drawn:
        index = tensor_beside(drawn, torch.int64, logits)
        token_ids[index] = _draw(full(adjusted[index]), [rows[r] for r in drawn])
    return choice_of(token_ids, logits, [row.params for row in rows])


def _best(logits: Tensor) -> Tensor:
    """Returns the likeliest token of each row, [R]; the first of equal ones."""
    if logits.is_cuda or logits.dtype not in (torch.float32, torch.float64):
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(-1))  # takes a tenth of torch's time


# --- before the temperature: what is added to single logits ---------------------------------------


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Returns `logits` itself, or a copy with suppressed ids, biases, penalties and masks
    applied."""
    touched = [r for r, row in enumerate(rows) if row.is_adjusted]
    if not touched:
        return logits
    adjusted = full(logits).clone()
    for r in touched:
        _adjust(adjusted[r], rows[r])
    return adjusted


def _adjust(logits: Tensor, row: SamplingRow) -> None:
    """Changes one row [V] in place."""
    if row.suppressed_ids:
        logits[_ids(row.suppressed_ids, logits)] = -math.inf
    if row.params.logit_bias:
        biases = row.params.biases
        ids = _ids(list(biases), logits)
        logits[ids] += tensor_beside(list(biases.values()), logits.dtype, logits)
    if row.params.has_penalties:
        _penalize(logits, row)
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: len(logits)]
        logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -math.inf)


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    assert not row.num_ahead, "penalties read all tokens of the answer"
    params = row.params
    output = _ids(row.tokens[row.num_prompt_tokens :], logits)
    if params.repetition_penalty != 1:
        # An id that occurs twice gets the same value twice.
        seen = _ids(row.tokens, logits)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(logits[output]))
    penalties = params.frequency_penalty * counts + params.presence_penalty
    logits -= torch.where(counts > 0, penalties, 0.0)


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return tensor_beside(token_ids, torch.int64, like)


# --- from the temperature on: which tokens remain, and the draw -----------------------------------


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draws token ids [R] from `logits` [R, V] by adding Gumbel noise and taking the largest."""
    dtype, vocab_size = logits.dtype, logits.shape[1]
    temperature = _column(logits, rows, temperature_of, dtype)
    top = logits.amax(dim=-1, keepdim=True)
    # If no token is allowed, all count as equally likely.
    scaled = (logits - top.masked_fill(top == -math.inf, 0.0)) / temperature
    lowest = lowest_kept(
        scaled,
        floor=_column(logits, rows, lambda row: log_of(row.params.min_p), dtype),
        top_k=_column(logits, rows, lambda row: top_k_of(row, vocab_size) or vocab_size),
        top_p=_column(logits, rows, lambda row: row.params.top_p, torch.float64),
    )
    scaled = scaled.masked_fill(scaled < lowest, -math.inf)
    seeds, indices = [row.seed for row in rows], [row.index for row in rows]
    return (scaled + gumbel(seeds, indices, vocab_size, logits.device)).argmax(dim=-1)


def _column(
    like: Tensor,
    rows: Sequence[SamplingRow],
    value: Callable[[SamplingRow], float],
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Makes a column [R, 1] on the device of `like`."""
    return tensor_beside([value(row) for row in rows], dtype, like).unsqueeze(1)


def temperature_of(row: SamplingRow) -> float:
    """Returns the temperature of a row that draws, kept far enough above 0 for float32."""
    return max(row.params.temperature, 1e-30)


def log_of(share: float) -> float:
    """Returns the lowest logit that min_p keeps, if the highest is 0."""
    return math.log(share) if share > 0 else -math.inf


def top_k_of(row: SamplingRow, vocab_size: int) -> int:
    """Returns top_k, or 0 if it keeps every token."""
    top_k = row.params.top_k
    return top_k if 0 < top_k < vocab_size else 0
