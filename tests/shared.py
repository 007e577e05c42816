"""Engines whose pages and slots share one memory, in place of pools of their own.

The cache goes on counting pages and slots apart; what the runner gets to see are ids in the shared
memory, pages in every other unit and slots between them. All but unit 0 holds NaN at first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from milepost import LLM
from milepost.cache.plans import PageCopy
from milepost.runner.in_flight import InFlightStep
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools
from milepost.runner.runner import Executor, Runner
from milepost.runner.shared import allocate_shared, unit_of
from milepost.scheduler.plans import SequencePlan, StepPlan, StepResult
from milepost.scheduler.request import Progress
from tests.engines import answer, ask, greedy, tokens

POISON = 0xFF
"""A byte of which every float type makes NaN."""


class SharedRunner(Runner):
    """Runs plans whose ids are those of two pools."""

    def __init__(
        self, executor: Executor, pools: Pools, *, num_units: int, pages_each: int
    ) -> None:
        super().__init__(executor, pools, num_slots=num_units)
        self._pages_each = pages_each
        self._swapped = 0

    def swap(self) -> None:
        """Have what was a page's become a slot's; nothing is held or cached."""
        self._swapped ^= 1

    def launch(self, plan: StepPlan, before: InFlightStep | None = None) -> InFlightStep:
        moved = structs.replace(plan, sequences=tuple(map(self._move, plan.sequences)))
        return replace(super().launch(moved, before), plan=plan)

    def _move(self, sequence: SequencePlan) -> SequencePlan:
        copy = sequence.page_copy
        if copy is not None:
            source, target = self._page(copy.source), self._page(copy.target)
            copy = PageCopy(source=source, target=target, num_tokens=copy.num_tokens)
        slots = [self._slot(each.slot) for each in sequence.exports]
        pairs = zip(sequence.exports, slots, strict=True)
        return structs.replace(
            sequence,
            new_pages=tuple(map(self._page, sequence.new_pages)),
            slot_in=self._slot(sequence.slot_in),
            slot_out=self._slot(sequence.slot_out),
            exports=tuple(structs.replace(each, slot=slot) for each, slot in pairs),
            page_copy=copy,
        )

    def _page(self, page: int) -> int:
        unit, inside = divmod(page, self._pages_each)
        return (2 * unit + 1 + self._swapped) * self._pages_each + inside

    def _slot(self, slot: int) -> int:
        return 2 * slot - self._swapped if slot else 0


def share_memory(llm: LLM, pages_each: int, make: Callable[[Pools, int], Executor]) -> SharedRunner:
    """Have the engine run on one memory from now on; `make` makes an executor of so many slots."""
    cache, runner = llm.llm_engine.scheduler.cache, llm.llm_engine.runner
    shape = shape_of(llm)
    num_units = 2 * max(-(-cache.pages.total // pages_each), cache.slots.total)
    pools = allocate_shared(
        shape, num_units=num_units, pages_each=pages_each, device=runner.pools.device
    )
    poison(pools, unit_of(shape, pages_each).num_bytes)
    shared = SharedRunner(make(pools, num_units), pools, num_units=num_units, pages_each=pages_each)
    llm.llm_engine.runner = llm.llm_engine.pipeline.runner = shared
    return shared


def shape_of(llm: LLM) -> PoolShape:
    runner = llm.llm_engine.runner
    model, pools = runner.executor.model, runner.pools
    return PoolShape(
        specs=model.layer_specs,
        page_size=pools.page_size,
        dtype=model.dtype,
        state_dtype=next(iter(pools.states.values())).recurrent.dtype,
    )


def poison(pools: Pools, unit_bytes: int) -> None:
    """Fill all but unit 0 with NaN."""
    memory_of(pools)[unit_bytes:] = POISON
    assert all(pool[-1].isnan().all() for pool in pools.kv.values())


def memory_of(pools: Pools) -> Tensor:
    """All of it, [bytes]."""
    assert pools.all_kv is not None
    memory = torch.empty(0, dtype=torch.uint8, device=pools.device)
    return memory.set_(pools.all_kv.untyped_storage())


def serve(llm: LLM) -> list[list[int]]:
    """Answers: cold, hits at and behind the end, branch points, marks, and more than there is room
    for. Nothing is cached before and afterwards."""
    assert llm.reset_prefix_cache()
    _time_steps_alike(llm)
    params = greedy(6)
    outputs = ask(llm, tokens(300), params=params)
    outputs += ask(llm, tokens(300), params=params)
    turn = [*tokens(300), *answer(outputs[0]), *tokens(40, 1)]
    outputs += ask(llm, turn, tokens(90, 2), [*tokens(300), *tokens(70, 3)], params=params)
    outputs += ask(llm, [*tokens(300), *tokens(9, 4)], params=params, cache_marks=[100])
    outputs += ask(llm, *(tokens(150 + 40 * i, 10 + i) for i in range(12)), params=greedy(25))
    assert llm.reset_prefix_cache()
    return [answer(output) for output in outputs]


def _time_steps_alike(llm: LLM) -> None:
    """Tells the scheduler that each step took a millisecond. Admission weighs seconds, so plans of
    two engines, and with them float32's rounding, would depend on what else the machine does."""
    scheduler = llm.llm_engine.scheduler
    update = type(scheduler).update

    def update_alike(plan: StepPlan, result: StepResult) -> list[Progress]:
        return update(scheduler, plan, structs.replace(result, seconds=0.001))

    scheduler.update = update_alike
