"""Executes step plans on the model. The only part that knows both plans and tensors.

Keeps, beside the pools, the position that each slot's contents have consumed, and refuses to read a
slot that holds another one than the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from milepost.models.hybrid import HybridModel
from milepost.runner.batch import PageTables, build
from milepost.runner.pools import Pools
from milepost.runner.sampling import SampledToken, SamplingRow, sample
from milepost.scheduler.plans import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """A step's report for the scheduler, and the sampled tokens with what was asked about them."""

    result: StepResult
    sampled: Mapping[str, SampledToken]


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
        """One step: page copies, one forward pass, sampling. `rows` by id of sampling requests."""
        for sequence in plan.sequences:
            held = self._positions[sequence.slot_in]
            assert held == sequence.start, (
                f"S4: slot {sequence.slot_in} holds {held} tokens, the plan reads {sequence.start}"
            )
            copy = sequence.page_copy
            if copy is not None:
                self.pools.copy_page(copy.source, copy.target, copy.num_tokens)
        token_ids, context = build(plan, self.pools, self._tables)
        hidden = self.model.forward(token_ids, context)
        sampled = self._sample(plan, hidden, rows)
        written = self._note_writes(plan)
        tokens = {id_: token.token_id for id_, token in sampled.items()}
        return RunnerOutput(result=StepResult(tokens=tokens, written=written), sampled=sampled)

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor, rows: Mapping[str, SamplingRow]
    ) -> dict[str, SampledToken]:
        ids, last_tokens, end = [], [], 0
        for sequence in plan.sequences:
            end += len(sequence.tokens)
            if sequence.samples:
                ids.append(sequence.request.id)
                last_tokens.append(end - 1)
        if not ids:
            return {}
        logits = self.model.compute_logits(hidden[torch.tensor(last_tokens, device=hidden.device)])
        return dict(zip(ids, sample(logits, [rows[id_] for id_ in ids]), strict=True))

    def _note_writes(self, plan: StepPlan) -> dict[int, int]:
        written = {}
        for sequence in plan.sequences:
            written[sequence.slot_out] = sequence.end
            for export in sequence.exports:
                written[export.slot] = export.position
        for slot, position in written.items():
            self._positions[slot] = position
        return written
