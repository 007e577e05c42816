"""The tokens that a step chose, on the device until they are read, and the log-probabilities of
these and of prompts' tokens.

Log-probabilities are the model's own: they come from the raw logits, before any sampling parameter
changes them.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from milepost.sampling_params import SamplingParams
from milepost.scheduler.plans import PromptScoring, StepPlan


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A chosen token. With `SamplingParams.logprobs`, it carries its log-probability and those of
    the likeliest tokens."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    """The likeliest tokens, best first; they need not include the chosen one."""
    rank: int | None = None
    """Rank of the chosen token, 1 for the likeliest; ties share the better rank."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens that a step chose."""

    token_ids: Tensor
    """[R] int64."""
    likelihoods: Likelihoods | None
    """Likelihoods on the host, valid once `is_copied` has passed."""
    copied: Tensor
    """`token_ids` on the host, once `is_copied` has passed; on a CPU, `token_ids` itself."""
    is_copied: torch.cuda.Event | None

    def read(self) -> list[SampledToken]:
        """Waits for the tokens, one per row, but not for later launches."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        tokens = list(map(SampledToken, self.copied.tolist()))
        if self.likelihoods is not None:
            self.likelihoods.add_to(tokens)
        return tokens


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens that may follow the tokens of requests."""

    numbers: Sequence[int]
    """Numbers of the requests."""
    copied: Tensor
    """Drafts [S, drafts] on the host, valid once `is_copied` has passed."""
    is_copied: torch.cuda.Event | None

    @staticmethod
    def of(numbers: Sequence[int], token_ids: Tensor) -> Drafts:
        """Starts copying drafts [S, drafts] to the host."""
        if not token_ids.is_cuda:
            return Drafts(numbers, token_ids, None)
        copied, event = _to_host(token_ids), torch.cuda.Event()
        event.record()
        return Drafts(numbers, copied, event)

    def read(self) -> dict[int, list[int]]:
        """Waits for the drafts, and returns them by request number."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return dict(zip(self.numbers, self.copied.tolist(), strict=True))


def choice_of(token_ids: Tensor, logits: Tensor, params: Sequence[SamplingParams]) -> Choice:
    """Starts copying the chosen tokens [R] to the host. `params` has one entry per row of `logits`
    [R, V]."""
    likelihoods = _measure(token_ids, logits, params)
    if not token_ids.is_cuda:
        return Choice(token_ids, likelihoods, token_ids, None)
    copied = _to_host(token_ids)
    if likelihoods is not None:
        likelihoods = likelihoods.to_host()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Choice(token_ids, likelihoods, copied, event)


def full(logits: Tensor) -> Tensor:
    """Returns the logits in float32, or float64 if they are float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def tensor_beside(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Makes a tensor on the device of `like`, without waiting for work that is queued there."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)
    return tensor.to(like.device, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to the host; the copy is valid once the device has reached it."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Log-probabilities of the tokens of some rows."""

    rows: Sequence[int]
    counts: Sequence[int]
    """Number of likeliest tokens that each of these rows asks for."""
    own: Tensor
    """[rows] log-probability of the chosen token."""
    ranks: Tensor
    """[rows] rank of the chosen token."""
    best: Tensor
    """[rows, largest count] log-probabilities of the likeliest tokens, best first."""
    best_ids: Tensor

    def to_host(self) -> Likelihoods:
        """Copies all tensors to the host; the copies are valid once the device has reached them."""
        return replace(
            self,
            own=_to_host(self.own),
            ranks=_to_host(self.ranks),
            best=_to_host(self.best),
            best_ids=_to_host(self.best_ids),
        )

    def add_to(self, tokens: list[SampledToken]) -> None:
        """Replaces the tokens of these rows by tokens with log-probabilities."""
        read = (self.own, self.ranks, self.best, self.best_ids)
        columns = zip(self.rows, self.counts, *(part.tolist() for part in read), strict=True)
        for r, count, chosen, rank, values, ids in columns:
            top = dict(zip(ids[:count], values[:count], strict=True))
            tokens[r] = SampledToken(tokens[r].token_id, chosen, top, rank)


def likeliest(logprobs: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the `num` largest values of each row and their ids, best first. Of equal values that
    of the lower id comes first, whatever is asked for in other rows."""
    if not num:
        return logprobs[:, :0], logprobs[:, :0].long()
    if logprobs.dtype != torch.float32:
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return values[:, :num], ids[:, :num]
    bits = logprobs.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as numbers are
    last = logprobs.shape[1] - 1
    places = last - torch.arange(last + 1, device=logprobs.device)
    keys = (ordered.long() << 32) | places
    ids = last - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
    return logprobs.gather(1, ids), ids


def _measure(
    token_ids: Tensor, logits: Tensor, params: Sequence[SamplingParams]
) -> Likelihoods | None:
    wanted = [r for r, chosen in enumerate(params) if chosen.logprobs is not None]
    if not wanted:
        return None
    counts = [params[r].logprobs or 0 for r in wanted]
    index = tensor_beside(wanted, torch.int64, logits)
    return _likelihoods(wanted, counts, token_ids[index], logits[index])


def _likelihoods(
    rows: Sequence[int], counts: Sequence[int], token_ids: Tensor, logits: Tensor
) -> Likelihoods:
    """Returns the likelihoods of `token_ids` [rows] by their `logits` [rows, V]."""
    logprobs = full(logits).log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    best, best_ids = likeliest(logprobs, min(max(counts), logits.shape[1]))
    return Likelihoods(
        rows=rows,
        counts=counts,
        own=chosen[:, 0],
        ranks=(logprobs > chosen).sum(dim=-1) + 1,
        best=best,
        best_ids=best_ids,
    )


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
        tokens = list(map(SampledToken, piece))
        token_ids = torch.tensor(piece, device=logits.device)
        counts = [scoring.num_top] * len(piece)
        _likelihoods(range(len(piece)), counts, token_ids, logits).add_to(tokens)
        yield from tokens
