"""The Triton kernels of an MTP head's inputs against the reference, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from milepost.kernels.mtp import CarryRows, join, triton
from tests.kernels.test_mtp import EPS, build_case


def padded(rows: CarryRows) -> CarryRows:
    """As long as a captured step's."""
    more = torch.full((3, 4), -1, dtype=torch.int32)
    return CarryRows(
        sources=torch.cat((rows.sources, more[:, :2])),
        targets=torch.cat((rows.targets, more)),
        recorded=torch.cat((rows.recorded, more[:, :2])),
    )


def lengthened(values: Tensor) -> Tensor:
    return torch.cat((values, values[:3]))


def test_join() -> None:
    case = build_case()
    given = case.hidden, case.token_ids, case.table, case.scales, EPS
    expected = join(*given, (case.carried, case.rows))
    longer = replace(case, token_ids=lengthened(case.token_ids), hidden=lengthened(case.hidden))
    joined = triton.join(
        longer.hidden,
        longer.token_ids,
        case.table,
        case.scales,
        EPS,
        (case.carried, padded(case.rows)),
    )
    torch.testing.assert_close(joined[: len(expected)], expected)
    torch.testing.assert_close(triton.join(*given), join(*given))


def test_keep() -> None:
    case = build_case()
    expected = case.kept()
    triton.keep(case.hidden, case.carried, padded(case.rows))
    case.assert_kept(expected)


def test_keep_without_records() -> None:
    case = build_case()
    case.carried = replace(case.carried, records=None)
    expected = case.carried.states.clone()
    rows = replace(case.rows, targets=case.rows.targets[:1])
    triton.keep(case.hidden, case.carried, rows)
    expected[1] = case.hidden[0]
    torch.testing.assert_close(case.carried.states, expected, rtol=0, atol=0, equal_nan=True)
