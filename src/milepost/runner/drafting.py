"""Drafts the tokens after a step's with the model's MTP head, one pass per draft, on any device.

A pass takes one token per request. The first pass takes the token sampled last and the model's
hidden state before it; each further pass takes the previous draft and the head's own hidden state.
The first pass writes final KV. The KV of further passes is a guess, like their tokens, and the step
that computes those tokens writes it again.

A request drafts as far as its page table reaches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from milepost.layers.context import Context
from milepost.models.decoder import Decoder
from milepost.runner import arrays
from milepost.runner.arrays import Geometry
from milepost.runner.choice import SampledToken
from milepost.runner.graphs import exact_capacity
from milepost.runner.pools import Pools
from milepost.runner.sampling import SamplingRow, choose
from milepost.runner.staging import on_device
from milepost.runner.tables import HostTables
from milepost.scheduler.plans import SequencePlan, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The place where one request's drafts begin."""

    number: int
    row: int
    """The step's sampled row of the last accepted token."""
    token: int
    """The sampled token."""
    position: int
    """Position of the sampled token."""
    shift: int
    """Difference between its rotary position and this one."""


def beginnings(plan: StepPlan, runs: Sequence[Sequence[SampledToken]]) -> list[Beginning]:
    """Returns a beginning for each request that samples; `runs` are their tokens, in the order of
    the plan."""
    rows, first = [], 0
    sampling = [sequence for sequence in plan.sequences if sequence.samples]
    for sequence, run in zip(sampling, runs, strict=True):
        num_accepted = len(run) - 1
        rows.append(
            Beginning(
                number=sequence.number,
                row=first + num_accepted,
                token=run[-1].token_id,
                position=sequence.end - sequence.num_drafts + num_accepted,
                shift=sequence.shift_after,
            )
        )
        first += 1 + sequence.num_drafts
    return rows


class Drafting:
    """Drafts with `model` over `pools`, and the page tables of the previous steps."""

    def __init__(
        self, model: Decoder, pools: Pools, tables: HostTables, geometry: Geometry
    ) -> None:
        assert model.mtp is not None, "only a model with a head drafts"
        self._model = model
        self._pools = pools
        self._tables = tables
        self._geometry = replace(geometry, operations=(model.mtp.attention.operation,))

    def draft(
        self,
        begun: Sequence[Beginning],
        hidden: Tensor,
        rows: Sequence[SamplingRow],
        num_drafts: int,
    ) -> dict[int, list[int]]:
        """Returns up to `num_drafts` drafts for each request; `hidden` [R, C] and `rows` belong to
        all tokens that the step sampled. A draft is drawn with the noise of its position, like the
        model's own token later, so the two are equal more often."""
        drafts: dict[int, list[int]] = {each.number: [] for each in begun}
        tokens, before = [each.token for each in begun], hidden[[each.row for each in begun]]
        for index in range(num_drafts):
            kept = [k for k, each in enumerate(begun) if self._reaches(each, index)]
            if not kept:
                break
            if len(kept) < len(begun):
                begun, tokens = [begun[k] for k in kept], [tokens[k] for k in kept]
                before = before[kept]
            before = self._pass(begun, tokens, before, index=index)
            logits = self._model.compute_logits(before)
            chosen = choose(logits, [_ahead(rows[each.row], 1 + index) for each in begun])
            tokens = chosen.token_ids.tolist()
            for each, token in zip(begun, tokens, strict=True):
                drafts[each.number].append(token)
        return drafts

    def _reaches(self, begun: Beginning, index: int) -> bool:
        return begun.position + index < self._tables.num_covered(begun.number)

    def _pass(
        self, begun: Sequence[Beginning], tokens: Sequence[int], before: Tensor, *, index: int
    ) -> Tensor:
        sequences = tuple(
            _one_token(each, each.position + index, token)
            for each, token in zip(begun, tokens, strict=True)
        )
        plan = StepPlan(sequences=sequences)
        host = arrays.build(plan, self._tables, self._geometry, exact_capacity(plan))
        step = on_device(host, self._pools.device)
        context = Context(
            step=step, tables=None, kv=self._pools.kv, states={}, conv_states={}, carried=None
        )
        return self._model.draft(step.token_ids, before, context)


def _one_token(begun: Beginning, position: int, token: int) -> SequencePlan:
    """Plans one request's part of a pass, which reads and writes no slot."""
    return SequencePlan(
        number=begun.number,
        shift=begun.shift,
        start=position,
        num_tokens=1,
        tokens=array("I", [token]).tobytes(),
        new_pages=(),
        write_from=0,
        slot_in=0,
        slot_out=0,
        samples=True,
    )


def _ahead(row: SamplingRow, num_ahead: int) -> SamplingRow:
    """Returns the row for a token `num_ahead` further on, without penalties, mask or
    log-probabilities, which depend on the tokens between."""
    params = row.params
    if params.has_penalties:
        params = replace(
            params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
        )
    if params.logprobs is not None:
        params = replace(params, logprobs=None)
    return replace(row, params=params, num_ahead=row.num_ahead + num_ahead, mask=None)
