from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from milepost.runner.staging import Staging


@dataclass(frozen=True)
class Inner:
    numbers: Any
    size: int


@dataclass(frozen=True)
class Outer:
    ids: Any
    inner: Inner | None
    rest: Any


def _batch(seed: int, length: int = 5) -> Outer:
    rng = np.random.default_rng(seed)
    return Outer(
        ids=rng.integers(0, 9, length),
        inner=Inner(numbers=rng.integers(0, 9, (3, 2)).astype(np.int32), size=7),
        rest=np.empty(0, np.int32),
    )


def test_views_hold_what_was_sent():
    staging = Staging(torch.device("cpu"), 1024)
    for seed in range(6):
        batch = _batch(seed)
        staging.send(batch)
        views = staging.views(batch)
        assert views.ids.dtype == torch.int64
        assert views.ids.tolist() == batch.ids.tolist()
        assert views.inner.numbers.dtype == torch.int32
        assert views.inner.numbers.tolist() == batch.inner.numbers.tolist()
        assert views.inner.size == 7
        assert views.rest.shape == (0,)


def test_views_of_the_same_shapes_lie_at_the_same_addresses():
    staging = Staging(torch.device("cpu"), 1024)
    first = staging.views(_batch(0))
    batch = _batch(1)
    staging.send(batch)
    assert first.ids.tolist() == batch.ids.tolist()
    assert first.inner.numbers.tolist() == batch.inner.numbers.tolist()


def test_batches_of_other_shapes_between(monkeypatch):
    """Whether where their arrays lie is remembered or not."""
    monkeypatch.setattr("milepost.runner.staging._MAX_PACKINGS", 2)
    staging = Staging(torch.device("cpu"), 1024)
    for turn in range(12):
        batch = _batch(turn, length=1 + turn % 3)
        staging.send(batch)
        views = staging.views(batch)
        assert views.ids.tolist() == batch.ids.tolist()
        assert views.inner.numbers.tolist() == batch.inner.numbers.tolist()


def test_absent_part():
    staging = Staging(torch.device("cpu"), 1024)
    batch = Outer(ids=np.arange(3), inner=None, rest=np.arange(2, dtype=np.int32))
    staging.send(batch)
    views = staging.views(batch)
    assert views.inner is None
    assert views.rest.tolist() == [0, 1]
