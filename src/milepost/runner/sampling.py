"""Chooses the next token of every sequence in a batch from its logits.

A row's token depends on its logits, its parameters, its tokens so far and (seed, number of tokens
so far): nothing is carried from one step to the next and rows do not see each other, so preemption,
batching and cache hits leave a sampled answer as it is. Order of operations, as in vLLM: suppressed
ids, logit_bias, penalties, the answer's form, temperature, min_p, top_k, top_p. Log-probabilities
are the model's own, from before all of these.

Legend: R rows, V vocabulary, C candidates (the likeliest tokens, sorted).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from milepost.kernels.sampling import can_search, nucleus_floor
from milepost.sampling_params import SamplingParams

_CANDIDATES = 1024
"""Tokens that top_p looks at first; it sorts the whole vocabulary only if they don't suffice."""


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """What the choice of one sequence's next token depends on, besides its logits."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    """The prompt; read only for a repetition penalty."""
    output_token_ids: Sequence[int]
    """The answer so far."""
    seed: int
    """This sample's own seed (`SamplingParams.sample_seed`)."""
    suppressed_ids: Sequence[int] = ()
    """Ids that may not be chosen now: those that end an answer, while it is below min_tokens."""
    constrain: Callable[[Tensor], None] | None = None
    """Sets the logits [V] of tokens that an answer of this form cannot have to minus infinity."""
    num_ahead: int = 0
    """Tokens of the answer that are chosen but not known yet."""

    @property
    def index(self) -> int:
        """Of the draw: the tokens before it."""
        return len(self.output_token_ids) + self.num_ahead


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token; with `SamplingParams.logprobs`, also how likely it and others were."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    """The likeliest tokens, best first; it need not hold the chosen one."""
    rank: int | None = None
    """1 for the likeliest token; ties share the better rank."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen tokens of a step, on the device until they are read."""

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
        tokens = [SampledToken(token_id) for token_id in self.copied.tolist()]
        if self.likelihoods is not None:
            self.likelihoods.add_to(tokens)
        return tokens


@torch.inference_mode()
def choose(logits: Tensor, rows: Sequence[SamplingRow], best: Tensor | None = None) -> Choice:
    """Choose one token per row of `logits` [R, V] (any float type; left as it is).

    Costs one argmax when every row is greedy and asks for nothing else, and not even that if it is
    given as `best` [R].
    """
    assert logits.shape[0] == len(rows), "one row of logits per sampling row"
    token_ids = _choose(logits, rows) if best is None or not _are_plain(rows) else best
    likelihoods = _measure(token_ids, logits, rows)
    if not token_ids.is_cuda:
        return Choice(token_ids, likelihoods, token_ids, None)
    copied = _to_host(token_ids)
    if likelihoods is not None:
        likelihoods = likelihoods.to_host()
    event = torch.cuda.Event()
    event.record()
    return Choice(token_ids, likelihoods, copied, event)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the device has come so far."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def _are_plain(rows: Sequence[SamplingRow]) -> bool:
    """Whether every row takes the best of its logits as they are."""
    return all(_takes_the_best(row.params) and not _is_adjusted(row) for row in rows)


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Token ids [R]."""
    adjusted = _adjusted(logits, rows)
    token_ids = _best(adjusted)
    drawn = [r for r, row in enumerate(rows) if not _takes_the_best(row.params)]
    if drawn:
        index = _on_device(drawn, torch.int64, logits)
        token_ids[index] = _draw(_full(adjusted[index]), [rows[r] for r in drawn])
    return token_ids


def _best(logits: Tensor) -> Tensor:
    """The likeliest token of each row, [R]; of equal ones the first."""
    if logits.is_cuda or logits.dtype not in (torch.float32, torch.float64):
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(-1))  # a tenth of the time


def _takes_the_best(params: SamplingParams) -> bool:
    return params.is_greedy or params.top_k == 1


def _full(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


# --- before the temperature: what is added to single logits ---------------------------------------


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`logits` itself, or a copy with suppressed ids, biases and penalties applied."""
    touched = [r for r, row in enumerate(rows) if _is_adjusted(row)]
    if not touched:
        return logits
    adjusted = _full(logits).clone()
    for r in touched:
        _adjust(adjusted[r], rows[r])
    return adjusted


def _is_adjusted(row: SamplingRow) -> bool:
    return bool(
        row.suppressed_ids
        or row.params.logit_bias
        or row.params.has_penalties
        or row.constrain is not None
    )


def _adjust(logits: Tensor, row: SamplingRow) -> None:
    """Change one row [V] in place."""
    if row.suppressed_ids:
        logits[_ids(row.suppressed_ids, logits)] = -math.inf
    if row.params.logit_bias:
        biases = list(row.params.logit_bias.values())
        logits[_ids(list(row.params.logit_bias), logits)] += _on_device(
            biases, logits.dtype, logits
        )
    if row.params.has_penalties:
        _penalize(logits, row)
    if row.constrain is not None:
        row.constrain(logits)


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    output = _ids(row.output_token_ids, logits)
    if params.repetition_penalty != 1:
        # An id that comes twice is given the same value twice.
        seen = torch.cat([_ids(row.prompt_token_ids, logits), output])
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(logits[output]))
    penalties = params.frequency_penalty * counts + params.presence_penalty
    logits -= torch.where(counts > 0, penalties, 0.0)


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return _on_device(token_ids, torch.int64, like)


def _on_device(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor beside `like`; the host doesn't wait for what is queued there."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)
    return tensor.to(like.device, non_blocking=True)


# --- from the temperature on: which tokens remain, and the draw -----------------------------------


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Token ids [R] drawn from `logits` [R, V] by adding Gumbel noise and taking the largest."""
    temperature = _column(logits, rows, lambda params: max(params.temperature, 1e-30))
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    scaled = scaled.masked_fill(scaled < _lowest_kept(scaled, rows), -math.inf)
    for r, row in enumerate(rows):
        scaled[r] += _gumbel(row.seed, row.index, scaled[r])
    return scaled.argmax(dim=-1)


def _column(
    like: Tensor, rows: Sequence[SamplingRow], value: Callable[[SamplingParams], float]
) -> Tensor:
    """[R, 1], in the type of `like`."""
    return _on_device([value(row.params) for row in rows], like.dtype, like).unsqueeze(1)


def _gumbel(seed: int, index: int, like: Tensor) -> Tensor:
    """Noise [V] for the token at `index` of the answer whose seed this is; finite, float32.

    The uniform numbers are multiples of 2**-24; half a step keeps them away from 0.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=like.device)
    generator.manual_seed(int.from_bytes(digest, "little"))
    uniform = torch.rand(like.shape, generator=generator, device=like.device) + 2.0**-25
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _lowest_kept(scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The lowest logit [R, 1] that min_p, top_k and top_p leave in; `scaled` has maximum 0.

    Equal logits stay or go together, so the order in which a sort leaves them does not matter.
    """
    floor = _column(scaled, rows, lambda params: _log(params.min_p))
    if all(row.params.top_k <= 0 and row.params.top_p == 1 for row in rows):
        return floor
    vocab_size = scaled.shape[1]
    top_k = _on_device([_top_k(row.params, vocab_size) for row in rows], torch.int64, scaled)
    top_p = _column(scaled, rows, lambda params: params.top_p)
    narrow = min(vocab_size, max(_CANDIDATES, *(max(row.params.top_k, 1) for row in rows)))
    top_k = top_k.unsqueeze(1)
    nucleus = _nucleus(scaled, floor, top_k, top_p, narrow)
    if narrow == vocab_size:
        return nucleus.lowest
    if can_search(scaled):
        # Whether that was enough is not asked, for the host would have to wait for the answer.
        wanted = top_p * nucleus.total
        return nucleus_floor(scaled, floor, wanted, nucleus.lowest, nucleus.is_final)
    if not nucleus.is_final.all():
        nucleus = _nucleus(scaled, floor, top_k, top_p, vocab_size)
    return nucleus.lowest


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


@dataclass(frozen=True, slots=True)
class _Nucleus:
    """What some of the likeliest tokens tell of those to keep; all [R, 1]."""

    lowest: Tensor
    """The lowest logit kept."""
    is_final: Tensor
    """Whether so many tokens are enough to know it."""
    total: Tensor
    """Mass of what min_p and top_k leave, float64, in units of the likeliest token's."""


def _nucleus(
    scaled: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int
) -> _Nucleus:
    """Look at `num_candidates` C, which covers every top_k below V. top_p is a share of what min_p
    and top_k leave.
    """
    values = scaled.topk(num_candidates, dim=-1).values
    ranks = torch.arange(num_candidates, device=scaled.device)
    is_left = (ranks < top_k) & (values >= floor)
    mass = torch.where(is_left, values.exp(), 0.0)
    up_to = mass.cumsum(dim=-1, dtype=torch.float64)
    is_unlimited = top_k == scaled.shape[1]
    everything = torch.where(scaled >= floor, scaled.exp(), 0.0).sum(-1, True, dtype=torch.float64)
    total = torch.where(is_unlimited, everything, up_to[:, -1:])
    is_kept = is_left & ((up_to - mass < top_p * total) | (top_p == 1))
    num_kept = is_kept.sum(dim=-1, keepdim=True)
    lowest = values.gather(1, (num_kept - 1).clamp(min=0))  # a row of NaN keeps none
    is_free = is_unlimited & (top_p == 1)
    is_final = is_free | ~is_unlimited | (num_kept < num_candidates)
    return _Nucleus(torch.where(is_free, floor, lowest), is_final, total)


# --- how likely the chosen token was --------------------------------------------------------------


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


def _measure(token_ids: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> Likelihoods | None:
    wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    counts = [rows[r].params.logprobs or 0 for r in wanted]
    index = _on_device(wanted, torch.int64, logits)
    logprobs = _full(logits[index]).log_softmax(dim=-1)
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
