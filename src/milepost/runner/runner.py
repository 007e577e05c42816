"""Executes step plans on the model. The only part that knows both plans and tensors.

Keeps, beside the pools, the position that each slot's contents have consumed, and refuses to read a
slot that holds another one than the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from milepost.models.hybrid import HybridModel
from milepost.runner.batch import PageTables, build
from milepost.runner.pools import Pools
from milepost.runner.sampling import Choice, SampledToken, SamplingRow, choose
from milepost.scheduler.plans import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """A step's report for the scheduler, and the sampled tokens with what was asked about them."""

    result: StepResult
    sampled: Mapping[str, SampledToken]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step under way."""

    plan: StepPlan
    ids: Sequence[str]
    """Requests that sample, in the order of the choice's rows."""
    choice: Choice | None
    written: Mapping[int, int]

    def token_ids(self, plan: StepPlan) -> torch.Tensor:
        """Tokens [T] of the plan that follows, on the device."""
        assert self.choice is not None, "a step that is followed samples"
        ids = [sequence.request.id for sequence in plan.sequences]
        if ids == list(self.ids):
            return self.choice.token_ids
        places = {id_: place for place, id_ in enumerate(self.ids)}
        index = torch.tensor([places[id_] for id_ in ids], device=self.choice.token_ids.device)
        return self.choice.token_ids[index]


class Runner:
    """Runs `model` over `pools`; `max_model_len` bounds the length of any sequence."""

    def __init__(
        self, model: HybridModel, pools: Pools, *, num_slots: int, max_model_len: int
    ) -> None:
        self.model = model
        self.pools = pools
        self._positions = [0] + [-1] * num_slots
        max_pages = -(-max_model_len // pools.page_size)
        self._tables = PageTables(num_slots, max_pages, model.embedding.device)

    def run(self, plan: StepPlan, rows: Mapping[str, SamplingRow]) -> RunnerOutput:
        """One step from its plan to its tokens. `rows` by id of sampling requests."""
        return self.collect(self.launch(plan, rows))

    def launch(
        self, plan: StepPlan, rows: Mapping[str, SamplingRow], before: Flight | None = None
    ) -> Flight:
        """Queue a step: page copies, one forward pass, sampling.

        A plan made ahead takes its tokens from the step `before`, which may still be running.
        """
        written = self._note_writes(plan)
        for sequence in plan.sequences:
            copy = sequence.page_copy
            if copy is not None:
                self.pools.copy_page(copy.source, copy.target, copy.num_tokens)
        token_ids, context = build(plan, self.pools, self._tables)
        if before is not None:
            token_ids = before.token_ids(plan)
        hidden = self.model.forward(token_ids, context)
        ids, choice = self._choose(plan, hidden, rows)
        return Flight(plan=plan, ids=ids, choice=choice, written=written)

    def collect(self, flight: Flight) -> RunnerOutput:
        """Wait for a step's tokens."""
        tokens = flight.choice.read() if flight.choice is not None else []
        sampled = dict(zip(flight.ids, tokens, strict=True))
        token_ids = {id_: token.token_id for id_, token in sampled.items()}
        result = StepResult(tokens=token_ids, written=flight.written)
        return RunnerOutput(result=result, sampled=sampled)

    def _choose(
        self, plan: StepPlan, hidden: torch.Tensor, rows: Mapping[str, SamplingRow]
    ) -> tuple[list[str], Choice | None]:
        ids, last_tokens, end = [], [], 0
        for sequence in plan.sequences:
            end += len(sequence.tokens)
            if sequence.samples:
                ids.append(sequence.request.id)
                last_tokens.append(end - 1)
        if not ids:
            return ids, None
        logits = self.model.compute_logits(hidden[torch.tensor(last_tokens, device=hidden.device)])
        return ids, choose(logits, [rows[id_] for id_ in ids])

    def _note_writes(self, plan: StepPlan) -> dict[int, int]:
        """Slot -> tokens that its contents will have consumed; refuses a plan that reads another
        state than it says.
        """
        written = {}
        for sequence in plan.sequences:
            held = self._positions[sequence.slot_in]
            assert held == sequence.start, (
                f"S4: slot {sequence.slot_in} holds {held} tokens, the plan reads {sequence.start}"
            )
            written[sequence.slot_out] = sequence.end
            for export in sequence.exports:
                written[export.slot] = export.position
        for slot, position in written.items():
            self._positions[slot] = position
        return written
