"""Kernels that state one order of sums give the same bits, whatever is computed beside a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("milepost.kernels.attention.run", exc_type=ImportError)

from milepost.kernels import sampling
from milepost.kernels.attention import run
from tests.kernels.attention_cases import Case, Step
from tests.kernels.orders import NUM_ROWS, SHAPES, compare, forms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["raw", "fp8", "int8", "int4"])
def test_products_with_one_order_have_one_result(form: str, shape: tuple[int, int]) -> None:
    weight = dict(forms(*shape))[form]
    found = [row | {"rows": num} for num in NUM_ROWS for row in compare(weight, num)]
    assert [row for row in found if not row["equal"]] == []


@pytest.mark.parametrize("has_float8", [False, True])
@pytest.mark.parametrize("num_beside", [1, 2, 7, 16, 33, 64])
def test_a_decode_has_the_same_bits_beside_others(num_beside: int, *, has_float8: bool) -> None:
    """Over KV that is too short to be split."""
    case = Case(
        starts=(100, *range(1, num_beside + 1)),
        lengths=(1,) * (num_beside + 1),
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        dtype=torch.bfloat16,
        has_float8=has_float8,
        least_rows=8 if has_float8 else 16,
    )
    together = Step(case, "cuda")
    items = together.items()
    assert not items.num_partials
    alone = replace(items, narrow=items.narrow[:1], bases=items.bases[:2])
    outputs = [
        run.attend(
            together.query[:count],
            None,
            together.kv(),
            together.on_device(work),
            case.head_dim**-0.5,
        )
        for count, work in ((len(together.query), items), (1, alone))
    ]
    assert torch.equal(outputs[0][:1], outputs[1])


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_likeliest_tokens_are_the_same_beside_other_rows(num_rows: int) -> None:
    logits = torch.randn(num_rows, 151_936, device="cuda").bfloat16()
    alone = torch.cat([sampling.argmax(row[None]) for row in logits[:8]])
    assert torch.equal(sampling.argmax(logits)[:8], alone)
