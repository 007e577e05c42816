"""Answers of mixers with states in slots whose tokens fall into steps and drafts by chance, beside
the same answers one token at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder
from milepost.runner.staging import on_device
from tests.batches import Part, build_batch
from tests.kernels import kimi, mixers, ssd
from tests.kernels.mixers import MixerShapes, make_pools, make_projected
from tests.numbers import relative_error

NUM_SEQUENCES, NUM_DRAFTS = 3, 4
MIXERS: Mapping[type, Any] = {each.Shapes: each for each in (mixers, kimi, ssd)}
"""What makes weights for shapes of these kinds, and launches a layer."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What runs, and on what; without a chip the reference."""

    shapes: MixerShapes
    dtype: torch.dtype
    state_dtype: torch.dtype | None = None
    device: str = "cpu"
    chip: Chip | None = None
    num_tokens: int = 8
    order: SumOrder = SumOrder.FREE


class Mixer:
    """Sequence s has slot s + 1, and row s of the records; the prompt beside them ends in 4."""

    def __init__(self, kind: Kind) -> None:
        self.kind, shapes, dtype = kind, kind.shapes, kind.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.mixer = MIXERS[type(shapes)]
        self.weights = self.mixer.make_weights(shapes, dtype, kind.device)
        states = kind.state_dtype or wide
        self.pools = make_pools(shapes, NUM_SEQUENCES + 2, dtype, kind.device, states)
        self.pools.conv[3], self.pools.recurrent[3] = 0, 0
        size = NUM_SEQUENCES, NUM_DRAFTS, len(shapes.recorded)
        self.records = torch.full(size, torch.nan, dtype=dtype, device=kind.device)

    def step(
        self,
        parts: dict[int, tuple[int, Tensor]],
        prefill: Tensor | None = None,
        *,
        verifies: bool = True,
        padding: int = 0,
    ) -> Tensor:
        """Of each sequence how much is folded, and its rows of the projection; so many sequences
        and tokens of padding. Unless it `verifies`, by the kernels for one token each."""
        places = [
            Part(pages=[1], start=9, length=len(rows), slot_in=s + 1, slot_out=s + 1, fold=fold)
            for s, (fold, rows) in parts.items()
        ]
        rows = [rows for _, rows in parts.values()]
        if prefill is not None:
            places.append(Part(pages=[1, 2], start=0, length=len(prefill), slot_in=0, slot_out=4))
            rows.append(prefill)
        batch = build_batch(places, 64, 0, len(parts))
        num_tokens = int(batch.lengths.sum())
        capacity = Capacity(
            num_tokens=num_tokens + padding,
            num_sequences=len(places) + padding,
            decodes=prefill is None,
            num_drafts=NUM_DRAFTS if verifies else 0,
        )
        batch = replace(
            batch,
            record_rows=np.array([*parts, -1])[: len(places)],
            capacity=capacity,
            chip=self.kind.chip,
            device=torch.device(self.kind.device),
        )
        how = {"order": self.kind.order}
        operation: Any = replace(self.kind.shapes.operation, **how)  # of a recurrence
        layout = on_device(operation.lay_out(batch), batch.device)
        slots = tuple(
            torch.from_numpy(each).to(batch.device) for each in (batch.slot_in, batch.slot_out)
        )
        inputs = torch.cat((*rows, rows[0].new_full((padding, rows[0].shape[1]), torch.nan)))
        step = self.kind.shapes, inputs, self.weights, self.pools, layout, slots
        output = self.mixer.launch(*step, self.records)
        return output[:num_tokens]

    def state(self, sequence: int) -> tuple[Tensor, Tensor]:
        return self.pools.conv[sequence + 1].clone(), self.pools.recurrent[sequence + 1].clone()


@dataclass
class Plain:
    """One token at a time."""

    kind: Kind
    tokens: list[Tensor] = field(init=False)
    """[T, ...] rows of the projection, of each sequence."""
    outputs: list[list[Tensor]] = field(init=False)
    states: list[list[tuple[Tensor, Tensor]]] = field(init=False)
    """After 0, 1, 2 ... tokens."""

    def __post_init__(self) -> None:
        kind, mixer, sequences = self.kind, Mixer(self.kind), range(NUM_SEQUENCES)
        num = NUM_SEQUENCES * kind.num_tokens
        rows = make_projected(kind.shapes, num, kind.dtype, kind.device)
        self.tokens = list(rows.split(kind.num_tokens))
        self.outputs = [[] for _ in sequences]
        self.states = [[mixer.state(s)] for s in sequences]
        for place in range(kind.num_tokens):
            parts = {s: (0, self.tokens[s][place : place + 1]) for s in sequences}
            output = mixer.step(parts, verifies=False)
            for sequence in sequences:
                self.outputs[sequence].append(output[sequence])
                self.states[sequence].append(mixer.state(sequence))


@dataclass
class Answer:
    """How far a sequence is: tokens committed, of which the last so many are not in the state."""

    committed: int = 0
    num_unfolded: int = 0


def play(
    plain: Plain, rng: random.Random, max_error: float = 0, max_output_error: float | None = None
) -> None:
    """Every state and every output of a token that is committed is the plain one's, bit for bit or
    up to a relative error, which may be another for outputs."""
    if max_output_error is None:
        max_output_error = max_error
    kind, mixer = plain.kind, Mixer(plain.kind)
    answers = [Answer() for _ in range(NUM_SEQUENCES)]
    wrong = make_projected(kind.shapes, NUM_DRAFTS, kind.dtype, kind.device, seed=9)
    while any(a.committed < kind.num_tokens or a.num_unfolded for a in answers):
        parts, accepted = {}, {}
        for sequence, answer in enumerate(answers):
            left = kind.num_tokens - answer.committed
            if not left and not answer.num_unfolded:
                continue
            drafts = rng.randint(0, min(NUM_DRAFTS, left - 1)) if left else 0
            right, first = rng.randint(0, drafts), answer.committed
            rows = plain.tokens[sequence][first : first + min(left, 1) + right]
            parts[sequence] = answer.num_unfolded, torch.cat((rows, wrong[: drafts - right]))
            accepted[sequence] = right
        outputs = mixer.step(parts).split([len(rows) for _, rows in parts.values()])
        for (sequence, right), output in zip(accepted.items(), outputs, strict=True):
            answer, first = answers[sequence], answers[sequence].committed
            answer.committed += len(output[: 1 + right])
            answer.num_unfolded = right
            own = plain.outputs[sequence][first : answer.committed]
            assert is_near(output[: 1 + right], own, max_output_error)
            expected = plain.states[sequence][answer.committed - right]
            assert is_near(mixer.state(sequence), expected, max_error)


def is_near(found: Iterable[Tensor], expected: Iterable[Tensor], max_error: float) -> bool:
    """Each is; without an error bit for bit."""
    if not max_error:
        return all(map(torch.equal, found, expected))
    return all(error <= max_error for error in map(relative_error, found, expected))


def is_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Both pools' states, bit for bit."""
    return all(map(torch.equal, found, expected))
