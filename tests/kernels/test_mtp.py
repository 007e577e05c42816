"""What an MTP head reads, beside a plain walk over the sequences; the Triton kernels' tests share
the cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.mtp import CarryRows, reference
from milepost.kernels.mtp.rows import lay_out
from tests.batches import Part, build_batch

SIZE, EPS, NUM_SLOTS = 24, 1e-6, 9
PARTS = [
    Part(pages=[1, 2], start=69, length=1, slot_in=1, slot_out=1),
    Part(pages=[3], start=5, length=1, slot_in=2, slot_out=3),
    Part(pages=[4, 5], start=30, length=50, slot_in=4, slot_out=5, exports={64: 6, 80: 8}),
    Part(pages=[6], start=0, length=20, slot_in=0, slot_out=7),
]
"""Two decodes, one of which resumes from another's slot; a chunk with states to keep, a prompt's
first."""


@dataclass
class Case:
    token_ids: Tensor
    table: Tensor
    hidden: Tensor
    carried: Tensor
    scales: tuple[Tensor, Tensor]
    rows: CarryRows

    def expected(self) -> Tensor:
        """Token by token."""
        rows, first = [], 0
        for part in PARTS:
            before = self.carried[part.slot_in]
            for index in range(first, first + part.length):
                embedded = self.table[self.token_ids[index]]
                rows.append(torch.cat((self._norm(embedded, 0), self._norm(before, 1))))
                before = self.hidden[index]
            first += part.length
        return torch.stack(rows)

    def _norm(self, x: Tensor, which: int) -> Tensor:
        wide = x.float()
        return wide * (wide.square().mean() + EPS).rsqrt() * self.scales[which]

    def kept(self) -> Tensor:
        """What slots carry behind the step."""
        carried, first = self.carried.clone(), 0
        for part in PARTS:
            for position, slot in part.exports.items():
                carried[slot] = self.hidden[first + position - part.start - 1]
            carried[part.slot_out] = self.hidden[first + part.length - 1]
            first += part.length
        return carried


def build_case() -> Case:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(part.length for part in PARTS)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    carried = torch.full((NUM_SLOTS, 2 * SIZE), torch.nan)[:, :SIZE]
    carried[:5] = randn(5, SIZE)
    carried[0] = 0
    return Case(
        token_ids=torch.randint(0, 31, (num_tokens,), generator=generator),
        table=randn(31, SIZE),
        hidden=randn(num_tokens, SIZE),
        carried=carried,
        scales=(randn(SIZE), randn(SIZE)),
        rows=lay_out(build_batch(PARTS, page_size=64, page_rows=128, num_decodes=2)),
    )


def test_every_token_is_joined_with_the_state_before_it() -> None:
    case = build_case()
    joined = reference.join(
        case.token_ids, case.table, case.hidden, case.scales, EPS, case.carried, case.rows
    )
    torch.testing.assert_close(joined, case.expected())


def test_slots_carry_the_last_state_of_what_they_stand_for() -> None:
    case = build_case()
    expected = case.kept()
    reference.keep(case.hidden, case.carried, case.rows)
    torch.testing.assert_close(case.carried, expected, rtol=0, atol=0, equal_nan=True)
