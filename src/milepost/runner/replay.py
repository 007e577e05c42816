"""Runs recorded steps again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import torch

from milepost.runner.in_flight import InFlightStep
from milepost.runner.pools import Pools
from milepost.runner.recording import PictureRecord, PoolRelease, Record, Rollback
from milepost.runner.runner import Runner
from milepost.scheduler.plans import StepPlan, StepResult, StepSampling


def replay(records: Iterable[Record], runner: Runner) -> Iterator[tuple[StepResult, StepResult]]:
    """Runs the records on a fresh runner. Yields each step's recorded result, and its result now.

    A step that was rolled back runs to its end here, though it may not have at the time: the state
    that it leaves in the pools is never read.
    """
    under_way: deque[InFlightStep] = deque()
    for record in records:
        match record:
            case StepPlan(sequences=()) if record.only_copies:
                runner.copy(record)
            case StepPlan():
                before = under_way[-1] if under_way else None
                under_way.append(runner.launch(record, before))
            case StepSampling():
                runner.sample(next(each for each in under_way if not each.is_sampled), record)
            case StepResult():
                yield record, runner.collect(under_way.popleft()).result
            case Rollback():
                under_way.clear()
            case PoolRelease():
                runner.release()
            case PictureRecord():
                runner.take_pixels(record)


def digest(pools: Pools) -> str:
    """Returns a digest of all bytes in the pools."""
    hasher = blake2b(digest_size=16)
    for storage in pools.storages():
        held = torch.empty(0, dtype=torch.uint8, device=pools.device).set_(storage)
        hasher.update(held.cpu().numpy().data)
    return hasher.hexdigest()
