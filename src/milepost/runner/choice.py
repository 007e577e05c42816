"""What a step chose: its tokens, on the device until they are read, and how likely they were.

Log-probabilities are the model's own: of the logits as they are, before anything that a request's
parameters do to them.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from milepost.sampling_params import SamplingParams


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The chosen token; with `SamplingParams.logprobs`, also how likely it and others were."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    """The likeliest tokens, best first; it need not hold the chosen one."""
    rank: int | None = None
    """1 for the likeliest token; ties share the better rank."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen tokens of a step."""

    token_ids: Tensor
    """[R] int64."""
    likelihoods: Likelihoods | None
    """On the host, once `is_copied` has come."""
    copied: Tensor
    """`token_ids` on the host, once `is_copied` has come; on a CPU it is `token_ids` itself."""
    is_copied: torch.cuda.Event | None

    def read(self) -> list[SampledToken]:
        """Wait for the tokens, one per row; not for what was launched behind them."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        tokens = list(map(SampledToken, self.copied.tolist()))
        if self.likelihoods is not None:
            self.likelihoods.add_to(tokens)
        return tokens


@dataclass(frozen=True, slots=True)
class Drafts:
    """What may follow the tokens of requests."""

    numbers: Sequence[int]
    """Of the requests."""
    copied: Tensor
    """[S, drafts] on the host, once `is_copied` has come."""
    is_copied: torch.cuda.Event | None

    @staticmethod
    def of(numbers: Sequence[int], token_ids: Tensor) -> Drafts:
        """Drafts [S, drafts], on their way to the host."""
        if not token_ids.is_cuda:
            return Drafts(numbers, token_ids, None)
        copied, event = _to_host(token_ids), torch.cuda.Event()
        event.record()
        return Drafts(numbers, copied, event)

    def read(self) -> dict[int, list[int]]:
        """Wait for them; by request number."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return dict(zip(self.numbers, self.copied.tolist(), strict=True))


def choice_of(token_ids: Tensor, logits: Tensor, params: Sequence[SamplingParams]) -> Choice:
    """The choice of these tokens [R], on its way to the host; `params` of each row of `logits`
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
    """In float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def tensor_beside(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor beside `like`; the host doesn't wait for what is queued there."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)
    return tensor.to(like.device, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the device has come so far."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """How likely the tokens of some rows were."""

    rows: Sequence[int]
    counts: Sequence[int]
    """How many of the likeliest tokens each of these rows asks for."""
    own: Tensor
    """[rows] log-probability of the chosen token."""
    ranks: Tensor
    """[rows] of the chosen token."""
    best: Tensor
    """[rows, most asked for] log-probabilities of the likeliest tokens, best first."""
    best_ids: Tensor

    def to_host(self) -> Likelihoods:
        """The same in copies that are there once the device has come so far."""
        parts = ("own", "ranks", "best", "best_ids")
        return replace(self, **{part: _to_host(getattr(self, part)) for part in parts})

    def add_to(self, tokens: list[SampledToken]) -> None:
        """Replace the tokens of these rows by ones that carry log-probabilities."""
        read = (self.own, self.ranks, self.best, self.best_ids)
        columns = zip(self.rows, self.counts, *(part.tolist() for part in read), strict=True)
        for r, count, own, rank, values, ids in columns:
            top = dict(zip(ids[:count], values[:count], strict=True))
            tokens[r] = SampledToken(tokens[r].token_id, own, top, rank)


def _measure(
    token_ids: Tensor, logits: Tensor, params: Sequence[SamplingParams]
) -> Likelihoods | None:
    wanted = [r for r, own in enumerate(params) if own.logprobs is not None]
    if not wanted:
        return None
    counts = [params[r].logprobs or 0 for r in wanted]
    index = tensor_beside(wanted, torch.int64, logits)
    logprobs = full(logits[index]).log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[index, None])
    best = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    return Likelihoods(
        rows=wanted,
        counts=counts,
        own=own[:, 0],
        ranks=(logprobs > own).sum(dim=-1) + 1,
        best=best.values,
        best_ids=best.indices,
    )
