"""Plans of prompts with pictures, and runners for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from tests.pictured import SETTINGS, Pictured
from torch import Tensor

from milepost.models import Decoder
from milepost.pictures import overlapping, position_shift
from milepost.runner.plain import PlainExecutor
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools, allocate
from milepost.runner.recording import Log, PictureRecord
from milepost.runner.runner import Executor, Runner
from milepost.scheduler.plans import SequencePlan, StepPlan

NUM_SLOTS = 4


def plain_executor(model: Decoder, pools: Pools) -> Executor:
    return PlainExecutor(model, pools, num_requests=4, max_model_len=256, image_settings=SETTINGS)


def open_runner(
    model: Decoder,
    make: Callable[[Decoder, Pools], Executor] = plain_executor,
    logs: Sequence[Log] = (),
) -> Runner:
    shape = PoolShape(
        specs=model.layer_specs,
        page_size=64,
        dtype=model.dtype,
        state_dtype=torch.float32,
        carried_size=model.carried_size,
        num_record_rows=2,
        num_drafts=0,
    )
    device = model.embedding.device
    pools = allocate(shape, num_pages=40, num_slots=NUM_SLOTS, device=device)
    return Runner(make(model, pools), pools, num_slots=NUM_SLOTS, logs=logs)


def give(runner: Runner, given: Pictured) -> None:
    """Hand the pixels of all pictures to the runner."""
    for each in given.images:
        record = PictureRecord(identity=each.identity, rows=each.rows.tobytes(), grid=each.grid)
        runner.take_pixels(record)


def part(given: Pictured, begin: int, end: int, slot: int) -> SequencePlan:
    """The plan for some of a prompt's tokens."""
    pictures = given.pictures
    first = 10 * slot if begin == 0 else None
    return SequencePlan(
        number=slot,
        start=begin,
        num_tokens=end - begin,
        tokens=array("I", given.token_ids[begin:end].tolist()).tobytes(),
        new_pages=() if first is None else tuple(range(first, first + 4)),
        write_from=begin,
        slot_in=slot if begin else 0,
        slot_out=slot,
        samples=True,
        pictures=tuple(overlapping(pictures, begin, end)),
        shift=position_shift(pictures, begin),
    )


def run(runner: Runner, given: Pictured, edges: Sequence[int], slot: int = 1) -> Tensor:
    """The logits after each chunk. Pictures are encoded in the step that needs them first."""
    found, known = [], set()
    for begin, end in pairwise(edges):
        sequence = part(given, begin, end, slot)
        new = tuple(each for each in sequence.pictures if each.identity not in known)
        known |= {each.identity for each in new}
        flight = runner.launch(StepPlan(sequences=(sequence,), encodes=new))
        assert flight.logits is not None
        found.append(flight.logits[0].clone())
    return torch.stack(found)
