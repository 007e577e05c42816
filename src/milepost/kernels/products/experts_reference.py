"""Routed experts in plain torch: the definition, on any device.

Legend: T tokens, X experts, N experts for each token, H hidden size, I intermediate size. `gate_up`
[X, 2 * I, H] holds a SwiGLU expert's gate rows, then its up rows; [X, I, H] the up rows of one that
has no gate, and squares a ReLU. `down` is [X, H, I].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import accumulation_dtype, cast, in_blocks, rows_apart
from milepost.kernels.products.forms import quantised
from milepost.kernels.products.forms.quantised import Quantised, nth

_DENSE_TOKENS = 32
_DENSE_WEIGHTS = 1 << 15
"""Up to this many tokens, and weights of an expert's first matrix, running all experts at once is
cheaper than visiting only the chosen ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How a router's logits become choices and routing weights."""

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """Sigmoid scores are computed from unrounded logits."""
    num_groups: int = 1
    """Groups of neighbouring experts. A token chooses only from the groups whose two best scores
    have the greatest sums."""
    num_groups_chosen: int = 1
    norm_eps: float = 0.0
    """Added to the sum by which routing weights are normalised."""
    scale: float = 1.0
    """Factor of all routing weights except the shared experts'."""
    gates_shared: bool = True
    """Whether the shared experts' routing weight is the sigmoid of the last logit. Otherwise it is
    1 and there is no such logit."""


SOFTMAX = Scores()


def route(
    logits: Tensor,
    num_chosen: int,
    *,
    normalise: bool,
    num_shared: int = 0,
    scores: Scores = SOFTMAX,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores the experts and chooses the best. Returns routing weights [T, N] in `dtype`, by
    default that of `logits`, and experts [T, N] int64.

    `logits` [T, X], or [T, P, X] whose parts are added up; for a softmax they are rounded to
    `dtype` first. `bias` [X] affects which experts are chosen but not their weights. With
    `normalise` the weights of a token's `num_chosen` experts add up to 1. Each token's last
    `num_shared` choices are shared experts, weighted by the sigmoid of the last logit; they do not
    affect the others.

    Tokens from `num_real` [1] on are padding. They choose the experts of the last real token, so
    that no expert is read for padding alone.
    """
    if num_real is not None:
        token = torch.arange(len(logits), device=logits.device)
        logits = logits[token.minimum(num_real - 1).clamp(min=0)]
    logits = logits if logits.dim() == 2 else logits.sum(1)
    dtype = dtype or logits.dtype
    if scores.kind == "softmax":
        logits = cast(logits, dtype)
    logits = cast(logits, accumulation_dtype(logits.dtype))
    has_gate = num_shared > 0 and scores.gates_shared
    routed = logits[:, :-1] if has_gate else logits
    if scores.kind == "softmax":
        values = routed.softmax(-1)
    else:
        values = rows_apart(routed, *routed.shape).copy_(routed).sigmoid_()
    wanted = values if bias is None else values + bias
    if scores.num_groups > 1:
        wanted = _among_best_groups(wanted, scores)
    experts = wanted.topk(num_chosen, dim=-1).indices
    weights = values.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + scores.norm_eps)
    weights = weights * scores.scale
    if num_shared:
        first = routed.shape[1]
        gate = logits[:, first:].sigmoid() if has_gate else weights.new_ones(len(weights), 1)
        weights = torch.cat((weights, gate.expand(-1, num_shared)), -1)
        shared = torch.arange(first, first + num_shared, device=experts.device)
        experts = torch.cat((experts, shared.expand(len(experts), -1)), -1)
    return cast(weights, dtype), experts


def _among_best_groups(wanted: Tensor, scores: Scores) -> Tensor:
    """Returns `wanted` [T, X], with minus infinity in all but the best groups."""
    groups: Tensor = wanted.unflatten(-1, (scores.num_groups, -1))
    sums = groups.topk(2, dim=-1).values.sum(-1)
    best = sums.topk(scores.num_groups_chosen, dim=-1).indices
    is_out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)


def apply(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float = 0.0,
    order: SumOrder = SumOrder.FREE,
) -> Tensor:
    """Returns the weighted sums [T, H] of the outputs of each token's experts. `hidden` [T, H],
    `weights` and `experts` [T, N]. Experts are added up in the order of their numbers."""
    given = hidden, weights, experts, gate_up, down
    if order.is_fixed:
        return _apply_hit(*given, limit, in_blocks)
    is_small = hidden.shape[0] <= _DENSE_TOKENS and gate_up[0].numel() <= _DENSE_WEIGHTS
    if is_small and experts.numel() >= gate_up.shape[0]:
        return _apply_all(*given, limit)
    return _apply_hit(*given, limit)


def _activate(inputs: Tensor, size: int, limit: float) -> Tensor:
    """Returns [..., `size`]: SiLU of the first half of the columns times the second half, or the
    square of the ReLU if there are no more columns than that."""
    if inputs.shape[-1] == size:
        return norm.reference.relu_squared(inputs)
    return norm.reference.silu_mul(inputs, limit)


def _apply_all(
    hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Runs every expert for every token; experts that were not chosen have a weight of zero."""
    num_experts = gate_up.shape[0]
    routing_weights = weights.new_zeros(hidden.shape[0], num_experts).scatter_(1, experts, weights)
    inputs = F.linear(hidden, gate_up.flatten(0, 1)).view(-1, num_experts, gate_up.shape[1])
    active = _activate(inputs, down.shape[2], limit).mul_(routing_weights[:, :, None])
    return torch.bmm(active.transpose(0, 1), down.transpose(1, 2)).sum(0)


def _at_once(compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return compute(rows)


def _apply_hit(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float,
    run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = _at_once,
) -> Tensor:
    """Runs the chosen experts, each on all its tokens. `run` calls the computation with all rows,
    or with blocks of them."""
    num_chosen = experts.shape[1]
    chosen, order = experts.flatten().sort(stable=True)
    tokens = order // num_chosen
    gathered = hidden.index_select(0, tokens)
    routing_weights = weights.flatten().index_select(0, order)[:, None]
    output = torch.zeros_like(hidden)
    end = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=gate_up.shape[0]).tolist()):
        if count == 0:
            continue
        rows = slice(end, end + count)
        end += count

        def compute(own: Tensor, expert: int = expert) -> Tensor:
            active = _activate(F.linear(own, gate_up[expert]), down.shape[2], limit)
            return F.linear(active, down[expert])

        mixed = run(compute, gathered[rows]).mul_(routing_weights[rows])
        output.index_add_(0, tokens[rows], mixed)
    return output


def mix_quantised(
    hidden: Tensor,
    shares: Tensor,
    experts: Tensor,
    up: Quantised,
    down: Quantised,
    *,
    limit: float = 0.0,
) -> Tensor:
    """Adds up the outputs of each token's experts, weighted by `shares`: [T, 1, H].

    `hidden` [T, H], `shares` and `experts` [T, N]; `up` [X, 2 * I, H] holds an expert's gate rows,
    then its up rows, or [X, I, H] its up rows alone: then a ReLU is squared; `down` [X, H, I].
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    output = hidden.new_zeros(len(hidden), down.num_outputs, dtype=dtype)
    width, run = down.num_inputs, in_blocks if up.order.is_fixed else _at_once
    for expert, tokens in _find_tokens(experts, len(up.scales)):

        def compute(own: Tensor, expert: int = expert) -> Tensor:
            inner = quantised.multiply(own, nth(up, expert))
            return quantised.multiply(_activate(inner, width, limit), nth(down, expert))

        share = torch.where(experts[tokens] == expert, shares[tokens], 0).sum(1, keepdim=True)
        output[tokens] += (run(compute, hidden[tokens]) * share).to(dtype)
    return output.to(hidden.dtype).unsqueeze(1)


def _find_tokens(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor | slice]]:
    """Yields experts and the tokens that may have chosen them. Steps on a device are captured, so
    its choices cannot be read: there each expert gets all tokens, which is slow but correct."""
    if experts.device.type != "cpu":
        yield from ((expert, slice(None)) for expert in range(num_experts))
        return
    for expert in experts.unique().tolist():
        yield expert, (experts == expert).any(1).nonzero().squeeze(1)
