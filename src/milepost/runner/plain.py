"""Runs a step on any device with the reference kernels, which define what a step computes, and
drafts the tokens after it with the model's MTP head."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from milepost.images import ImageSettings
from milepost.layers.context import Context
from milepost.models.decoder import Decoder
from milepost.runner import arrays
from milepost.runner.arrays import Geometry
from milepost.runner.choice import SampledToken, score_prompts, wants_scores
from milepost.runner.graphs import exact_capacity
from milepost.runner.in_flight import InFlightStep
from milepost.runner.pictures import EncodedPictures, rows_of
from milepost.runner.pools import Pools
from milepost.runner.sampling import SamplingRow, choose
from milepost.runner.staging import on_device
from milepost.runner.tables import HostTables, RecordRows
from milepost.scheduler.plans import SequencePlan, StepPlan


class PlainExecutor:
    """Runs `model` over `pools`, launch by launch. `num_requests` bounds the requests that run at
    once, `max_model_len` any sequence."""

    keeps_counts = False

    def __init__(
        self,
        model: Decoder,
        pools: Pools,
        *,
        num_requests: int,
        max_model_len: int,
        image_settings: ImageSettings | None = None,
    ) -> None:
        self.model = model
        self.pictures = EncodedPictures.of(model, image_settings)
        self._pools = pools
        max_pages = -(-max_model_len // pools.page_size)
        sizes = num_requests, max_pages, pools.page_size
        windows = HostTables.of_windows(*sizes) if pools.all_windows is not None else None
        self._tables = HostTables(*sizes, windows)
        self._records = RecordRows(pools.num_record_rows)
        self._geometry = Geometry.of(model, pools, None)
        has_head = model.mtp is not None
        self._drafting = Drafting(model, pools, self._tables, self._geometry) if has_head else None

    def launch(self, plan: StepPlan, before: InFlightStep | None) -> InFlightStep:
        """Runs one forward pass."""
        self._tables.follow(plan)
        self._records.follow(plan)
        capacity = exact_capacity(plan)
        host = arrays.build(plan, self._tables, self._geometry, capacity, records=self._records)
        step = on_device(host, self._pools.device)
        if before is not None:
            places = before.places(plan)
            if places:
                step.token_ids[: len(places)] = before.token_ids[places]
        numbers = plan.sampled_numbers
        is_even = len(numbers) == capacity.num_sampled  # each row is a sampled token
        last_tokens_only = is_even and self.model.ends_early(capacity) and not wants_scores(plan)
        context = Context(
            step=step,
            tables=None,
            kv=self._pools.kv,
            states=self._pools.states,
            conv_states=self._pools.conv_states,
            carried=self._pools.carried,
            conv_records=self._pools.conv_records,
            last_tokens_only=last_tokens_only,
            pictures=rows_of(self.pictures, plan, self._geometry.merge_size),
        )
        hidden = self.model.forward(step.token_ids, context)
        scores = score_prompts(plan, hidden, self.model.compute_logits)
        if not numbers:
            return InFlightStep(plan=plan, numbers=numbers, prompt_scores=scores)
        sampled = hidden if last_tokens_only else hidden[step.last_tokens[: len(numbers)]]
        return InFlightStep(
            plan=plan,
            numbers=numbers,
            logits=self.model.compute_logits(sampled),
            hidden=sampled,
            prompt_scores=scores,
        )

    def sample(self, flight: InFlightStep, rows: Sequence[SamplingRow]) -> None:
        """Samples with the reference."""
        assert flight.logits is not None
        flight.choice = choose(flight.logits, rows)

    def draft(self, flight: InFlightStep, rows: Sequence[SamplingRow], num_drafts: int) -> None:
        """Drafts tokens after the sampled ones, one pass of the head for each."""
        assert self._drafting is not None, "only a model with a head drafts"
        assert flight.hidden is not None
        begun = beginnings(flight.plan, list(flight.read().values()))
        flight.drafts = self._drafting.draft(begun, flight.hidden, rows, num_drafts)


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
    """Drafts with `model` over `pools`, and the page tables of the previous steps, one pass per
    draft.

    A pass takes one token per request. The first pass takes the token sampled last and the model's
    hidden state before it; each further pass takes the previous draft and the head's own hidden
    state. The first pass writes final KV. The KV of further passes is a guess, like their tokens,
    and the step that computes those tokens writes it again. A request drafts as far as its page
    table reaches.
    """

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
