"""Plans of prompts with pictures, and runners for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from tests.batches import Part, build_pools
from tests.pictured import SETTINGS, Pictured
from torch import Tensor

from milepost.images.settings import ImageSettings
from milepost.models import Decoder
from milepost.pictures import overlapping, position_shift
from milepost.runner.pictures import EncodedPictures, PicturePixels, rows_of
from milepost.runner.plain import PlainExecutor
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools, allocate
from milepost.runner.recording import Log, PictureRecord
from milepost.runner.runner import Executor, Runner
from milepost.scheduler.plans import SequencePlan, StepPlan

NUM_SLOTS = 4
PAGES = [3, 1, 5, 2]
"""Pages of the sequence of `chunked_logits`."""


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


def chunked_logits(
    model: Decoder, settings: ImageSettings, given: Pictured, edges: Sequence[int]
) -> Tensor:
    """Returns the logits of all tokens of a sequence in slot 1, in chunks, of a model whose
    pictures have one position for each token."""
    pools, chunks = build_pools(model), []
    encoded = EncodedPictures.of(model, settings)
    assert encoded is not None
    assert model.merge_size is None, "tokens of pictures have one position each"
    for each in given.images:
        encoded.take(each.identity, PicturePixels(rows=each.rows, grid=each.grid))
    encoded.follow(StepPlan(sequences=(), encodes=tuple(given.pictures)))
    for begin, end in pairwise(edges):
        slot = 1 if begin else 0
        chunk = Part(pages=PAGES, start=begin, length=end - begin, slot_in=slot, slot_out=1)
        plan = StepPlan(sequences=(part(given, begin, end, 1),))
        ctx = replace(pools.context([chunk]), pictures=rows_of(encoded, plan, None))
        chunks.append(model.compute_logits(model(given.token_ids[begin:end], ctx)))
    return torch.cat(chunks)
