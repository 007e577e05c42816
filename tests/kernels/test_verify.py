"""Steps that verify, by the references: however an answer's tokens fall into steps and drafts,
states and outputs are those of one token at a time, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.kernels import gated_delta
from milepost.kernels.attention import reference as attention
from milepost.kernels.attention import rows_per_page
from milepost.kernels.gated_delta import GatedDeltaOperation
from milepost.kernels.mamba2 import Mamba2Operation
from milepost.kernels.short_conv import ShortConvOperation
from tests.batches import Part, build_batch, build_pages
from tests.kernels.mixers import Shapes, make_pools, make_projected, make_weights, widen
from tests.numbers import relative_error

SHAPES = Shapes(key_heads=2, value_heads=4, key_dim=16, value_dim=8)
NUM_SEQUENCES, NUM_TOKENS, NUM_DRAFTS = 3, 8, 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class Mixer:
    """Gated DeltaNet; sequence s has slot s + 1, and row s of the records."""

    def __init__(self, dtype: torch.dtype) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weights = make_weights(SHAPES, dtype)
        self.weights = widen(weights, wide) if dtype == torch.float64 else weights
        self.pools = make_pools(SHAPES, NUM_SEQUENCES + 1, dtype, state_dtype=wide)
        self.pools.conv[3], self.pools.recurrent[3] = 0, 0
        size = SHAPES.channels + 2 * SHAPES.value_heads
        self.records = torch.full((NUM_SEQUENCES, NUM_DRAFTS, size), torch.nan, dtype=dtype)

    def step(self, parts: dict[int, tuple[int, Tensor]], prefill: Tensor | None = None) -> Tensor:
        """Of each sequence how much is folded, and its rows of the projection."""
        places = [
            Part(pages=[1], start=9, length=len(rows), slot_in=s + 1, slot_out=s + 1, fold=fold)
            for s, (fold, rows) in parts.items()
        ]
        rows = [rows for _, rows in parts.values()]
        if prefill is not None:
            places.append(Part(pages=[1, 2], start=0, length=len(prefill), slot_in=0, slot_out=4))
            rows.append(prefill)
        batch = build_batch(places, 64, 0, len(parts))
        batch = replace(batch, record_rows=np.array([*parts, -1])[: len(places)])
        layout = GatedDeltaOperation(conv_width=SHAPES.taps).lay_out(batch)
        slots = torch.from_numpy(batch.slot_in), torch.from_numpy(batch.slot_out)
        pools = self.pools.conv, self.pools.recurrent
        return gated_delta.mix(
            torch.cat(rows), self.weights, *pools, *slots, layout, records=self.records
        )

    def state(self, sequence: int) -> tuple[Tensor, Tensor]:
        return self.pools.conv[sequence + 1].clone(), self.pools.recurrent[sequence + 1].clone()


@dataclass
class Plain:
    """One token at a time."""

    tokens: list[Tensor]
    """[T, ...] rows of the projection, of each sequence."""
    outputs: list[list[Tensor]]
    states: list[list[tuple[Tensor, Tensor]]]
    """After 0, 1, 2 ... tokens."""


@cache
def run_plain(dtype: torch.dtype) -> Plain:
    mixer, sequences = Mixer(dtype), range(NUM_SEQUENCES)
    tokens = list(make_projected(SHAPES, NUM_SEQUENCES * NUM_TOKENS, dtype).split(NUM_TOKENS))
    plain = Plain(tokens, [[] for _ in sequences], [[mixer.state(s)] for s in sequences])
    for place in range(NUM_TOKENS):
        output = mixer.step({s: (0, tokens[s][place : place + 1]) for s in sequences})
        for sequence in sequences:
            plain.outputs[sequence].append(output[sequence])
            plain.states[sequence].append(mixer.state(sequence))
    return plain


@dataclass
class Answer:
    """How far a sequence is: tokens committed, of which the last so many are not in the state."""

    committed: int = 0
    num_unfolded: int = 0


def equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_split_gives_the_states_of_one_token_at_a_time(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    plain, mixer = run_plain(dtype), Mixer(dtype)
    answers = [Answer() for _ in range(NUM_SEQUENCES)]
    wrong = make_projected(SHAPES, NUM_DRAFTS, dtype, seed=9)
    while any(a.committed < NUM_TOKENS or a.num_unfolded for a in answers):
        parts, accepted = {}, {}
        for sequence, answer in enumerate(answers):
            left = NUM_TOKENS - answer.committed
            if not left and not answer.num_unfolded:
                continue
            drafts = data.draw(st.integers(0, min(NUM_DRAFTS, left - 1))) if left else 0
            right = data.draw(st.integers(0, drafts))
            first = answer.committed
            rows = [plain.tokens[sequence][first : first + min(left, 1) + right]]
            rows.append(wrong[: drafts - right])
            parts[sequence] = answer.num_unfolded, torch.cat(rows)
            accepted[sequence] = right
        outputs = mixer.step(parts).split([len(rows) for _, rows in parts.values()])
        for (sequence, right), output in zip(accepted.items(), outputs, strict=True):
            answer, first = answers[sequence], answers[sequence].committed
            answer.committed += len(output[: 1 + right])
            answer.num_unfolded = right
            own = plain.outputs[sequence][first : answer.committed]
            assert all(map(torch.equal, output[: 1 + right], own))
            expected = plain.states[sequence][answer.committed - right]
            assert equal(mixer.state(sequence), expected)
    for sequence in range(NUM_SEQUENCES):
        assert equal(mixer.state(sequence), plain.states[sequence][NUM_TOKENS])


def test_a_prefill_beside_verifying_sequences_is_what_it_is_alone() -> None:
    plain, beside, alone = (run_plain(torch.float32), Mixer(torch.float32), Mixer(torch.float32))
    prompt = make_projected(SHAPES, 70, seed=5)
    for mixer in (beside, alone):
        mixer.pools = make_pools(SHAPES, NUM_SEQUENCES + 2)
    output = beside.step({0: (0, plain.tokens[0][:3]), 1: (0, plain.tokens[1][:1])}, prompt)
    expected = alone.step({}, prompt)
    assert torch.equal(output[4:], expected)
    assert equal(beside.state(3), alone.state(3))
    assert torch.equal(output[0], plain.outputs[0][0])
    assert equal(beside.state(0), plain.states[0][1])


def test_drafts_leave_no_trace_but_their_records() -> None:
    mixer, tokens = Mixer(torch.float32), run_plain(torch.float32).tokens[1]
    mixer.step({1: (0, tokens[:3])})
    others = [0, 2]
    assert mixer.records[others].isnan().all()
    columns = [*range(SHAPES.channels), *range(-2 * SHAPES.value_heads, 0)]
    assert torch.equal(mixer.records[1, :2], tokens[1:3, columns])
    assert mixer.records[1, 2:].isnan().all()
    assert equal(mixer.state(1), run_plain(torch.float32).states[1][1])


@pytest.mark.parametrize(
    "operation",
    [Mamba2Operation(conv_width=4, chunk=64, num_groups=1), ShortConvOperation(num_taps=3)],
    ids=lambda operation: type(operation).__name__,
)
@pytest.mark.parametrize(("fold", "length"), [(1, 1), (0, 2), (1, 0)])
def test_mixers_without_records_refuse(operation, fold: int, length: int) -> None:
    part = Part(pages=[1], start=9, length=length, slot_in=1, slot_out=1, fold=fold)
    with pytest.raises(AssertionError, match="V1"):
        operation.lay_out(build_batch([part], 64, 128, 1))
    plain = Part(pages=[1], start=9, length=1, slot_in=1, slot_out=1)
    operation.lay_out(build_batch([plain], 64, 128, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_drafts_attend_as_the_tokens_that_they_are_would(dtype: torch.dtype) -> None:
    heads, kv_heads, size, page_size = 6, 3, 16, 16
    random = torch.Generator().manual_seed(0)
    starts, lengths, pages = [15, 40, 3], [4, 1, 3], [[2, 5], [1, 7, 3], [4]]
    pool = build_pages(9, page_size, kv_heads, size, dtype)
    pool.copy_(torch.randn(pool.shape, generator=random))
    query, key, value = (
        torch.randn(sum(lengths), each, size, generator=random).to(dtype)
        for each in (heads, kv_heads, kv_heads)
    )

    def attend(lengths: list[int], chosen: list[int]) -> Tensor:
        parts = [
            Part(pages=pages[s], start=starts[s], length=n, slot_in=1, slot_out=1)
            for s, n in enumerate(lengths)
        ]
        rows = attention.lay_out(build_batch(parts, page_size, rows_per_page(pool), len(parts)))
        attention.store(pool, key[chosen], value[chosen], rows.tokens, rows.kv_rows)
        return attention.decode(query[chosen], pool, rows.decodes, size**-0.5)

    together, begins = attend(lengths, list(range(sum(lengths)))), [0, 4, 5]
    for place in range(max(lengths)):
        now = [s for s, n in enumerate(lengths) if place < n]
        one = attend([int(s in now) for s in range(3)], [begins[s] + place for s in now])
        theirs = together[[begins[s] + place for s in now]]
        assert relative_error(one, theirs) < (1e-14 if dtype == torch.float64 else 2e-6)
        starts = [start + (s in now) for s, start in enumerate(starts)]
