"""What an MTP head reads, beside a plain walk over the sequences; the Triton kernels' tests share
the cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.mtp import Carried, CarryRows, join, keep, lay_out
from tests.batches import Part, build_batch

SIZE, EPS, NUM_SLOTS, NUM_DRAFTS = 24, 1e-6, 12, 3
PARTS = [
    Part(pages=[1, 2], start=69, length=1, slot_in=1, slot_out=1),
    Part(pages=[3], start=5, length=1, slot_in=2, slot_out=3),
    Part(pages=[7], start=9, length=3, slot_in=9, slot_out=9, fold=2),
    Part(pages=[8], start=9, length=0, slot_in=10, slot_out=10, fold=3),
    Part(pages=[9], start=9, length=4, slot_in=11, slot_out=11),
    Part(pages=[4, 5], start=30, length=50, slot_in=4, slot_out=5, exports={64: 6, 80: 8}),
    Part(pages=[6], start=0, length=20, slot_in=0, slot_out=7),
]
"""Decodes, one of which resumes from another's slot; some that verify, among them one that only
folds; a chunk with states to keep; a prompt's first."""
NUM_DECODES = 5


@dataclass
class Case:
    token_ids: Tensor
    table: Tensor
    hidden: Tensor
    carried: Carried
    scales: tuple[Tensor, Tensor]
    rows: CarryRows

    def expected(self) -> Tensor:
        """Token by token."""
        rows, first = [], 0
        for row, part in enumerate(PARTS):
            before = self.carried.states[part.slot_in]
            if part.fold:
                before = self.carried.records[row, part.fold - 1]
            for index in range(first, first + part.length):
                embedded = self.table[self.token_ids[index]]
                rows.append(torch.cat((self._norm(embedded, 0), self._norm(before, 1))))
                before = self.hidden[index]
            first += part.length
        return torch.stack(rows)

    def _norm(self, x: Tensor, which: int) -> Tensor:
        wide = x.float()
        return wide * (wide.square().mean() + EPS).rsqrt() * self.scales[which]

    def kept(self) -> Carried:
        """What is carried behind the step."""
        states, records, first = self.carried.states.clone(), self.carried.records.clone(), 0
        for row, part in enumerate(PARTS):
            num_final = min(part.length, 1) if row < NUM_DECODES else part.length
            for position, slot in part.exports.items():
                states[slot] = self.hidden[first + position - part.start - 1]
            if num_final:
                states[part.slot_out] = self.hidden[first + num_final - 1]
            else:
                states[part.slot_out] = self.carried.records[row, part.fold - 1]
            records[row, : part.length - num_final] = self.hidden[
                first + num_final : first + part.length
            ]
            first += part.length
        return Carried(states=states, records=records)

    def assert_kept(self, expected: Carried) -> None:
        """Bit for bit, and nothing else is touched."""
        for found, wanted in (
            (self.carried.states, expected.states),
            (self.carried.records, expected.records),
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def build_case() -> Case:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(part.length for part in PARTS)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    states = torch.full((NUM_SLOTS, 2 * SIZE), torch.nan)[:, :SIZE]
    states[:5] = randn(5, SIZE)
    states[9:] = randn(3, SIZE)
    states[0] = 0
    records = torch.full((len(PARTS), NUM_DRAFTS, SIZE), torch.nan)
    records[2, :2], records[3] = randn(2, SIZE), randn(3, SIZE)
    return Case(
        token_ids=torch.randint(0, 31, (num_tokens,), generator=generator),
        table=randn(31, SIZE),
        hidden=randn(num_tokens, SIZE),
        carried=Carried(states=states, records=records),
        scales=(randn(SIZE), randn(SIZE)),
        rows=lay_out(build_batch(PARTS, page_size=64, page_rows=128, num_decodes=NUM_DECODES)),
    )


def test_every_token_is_joined_with_the_state_before_it() -> None:
    case = build_case()
    joined = join(
        case.hidden, case.token_ids, case.table, case.scales, EPS, (case.carried, case.rows)
    )
    torch.testing.assert_close(joined, case.expected())


def test_slots_carry_the_last_state_of_what_they_stand_for() -> None:
    case = build_case()
    expected = case.kept()
    keep(case.hidden, case.carried, case.rows)
    case.assert_kept(expected)
