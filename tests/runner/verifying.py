"""Runners whose steps verify, and what they must leave and answer."""

from __future__ import annotations

import torch
from tests.numbers import relative_error
from tests.runner.test_arrays import sequence
from torch import Tensor

from milepost.models import Decoder
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools, allocate
from milepost.runner.runner import Runner
from milepost.scheduler.plans import SequencePlan, StepPlan

TOKENS = [*range(100, 190)]
NUM_SLOTS = 4


def open_pools(model: Decoder, num_drafts: int, device: torch.device) -> Pools:
    """With records for two requests."""
    shape = PoolShape(
        specs=model.layer_specs,
        page_size=64,
        dtype=model.dtype,
        state_dtype=torch.float64 if model.dtype == torch.float64 else torch.float32,
        carried_size=model.carried_size,
        num_record_rows=2,
        num_drafts=num_drafts,
    )
    return allocate(shape, num_pages=40, num_slots=NUM_SLOTS, device=device)


def run(runner: Runner, *sequences: SequencePlan) -> Tensor | None:
    """The logits; those of a graph are written again by its next run."""
    logits = runner.launch(StepPlan(sequences=sequences)).logits
    return None if logits is None else logits.clone()


def part(begin: int, end: int, slot: int, **changes) -> SequencePlan:
    """Of the tokens that every sequence has."""
    changes = {"new_pages": ()} | changes
    return sequence(begin, TOKENS[begin:end], slot, **changes)


def state_of(runner: Runner, slot: int) -> Tensor:
    """Of all recurrent layers."""
    parts = [
        pool[slot].flatten()
        for state in runner.pools.states.values()
        for pool in (state.conv, state.recurrent)
    ]
    return torch.cat(parts)


def assert_drafts_leave_what_tokens_do(plain: Runner, verifying: Runner, bound: float) -> None:
    """With a sequence that rejects, one that ends, and a prefill beside them."""
    for runner in (plain, verifying):
        run(runner, part(0, 70, 1, slot_in=0, new_pages=(4, 5)))
        run(runner, part(0, 70, 2, slot_in=0, new_pages=(6, 7)))
    expected, states = [], [state_of(plain, 1)]
    for place in range(70, 80):
        expected.append(run(plain, part(place, place + 1, 1))[0])
        states.append(state_of(plain, 1))

    def assert_states(*numbers: int) -> None:
        for slot, number in enumerate(numbers, start=1):
            assert relative_error(state_of(verifying, slot), states[number]) < bound

    right = sequence(70, TOKENS[70:74], 1, num_drafts=3, new_pages=())
    wrong = sequence(70, [TOKENS[70], 9, 9], 2, num_drafts=2, new_pages=())
    prompt = part(0, 70, 3, slot_in=0, new_pages=(8, 9))
    logits = run(verifying, right, wrong, prompt)
    assert len(logits) == 4 + 3 + 1
    assert relative_error(logits[:4], torch.stack(expected[:4])) < bound
    assert relative_error(logits[4], expected[0]) < bound
    assert_states(1, 1, 0)

    again = sequence(74, TOKENS[74:76], 1, num_drafts=1, fold=3, new_pages=())
    logits = run(verifying, again, part(71, 72, 2))
    assert relative_error(logits, torch.stack([*expected[4:6], expected[1]])) < bound
    assert_states(5, 2)
    # The answer is over: a step that computes nothing folds its last token in.
    assert run(verifying, part(76, 76, 1, fold=1, samples=False)) is None
    assert_states(6, 2, 0)
