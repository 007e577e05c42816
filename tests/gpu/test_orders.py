"""Kernels that state one order of sums give the same bits, whatever is computed beside a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("milepost.kernels.attention.run", exc_type=ImportError)

from milepost.kernels import norm, products, sampling
from milepost.kernels.attention import run
from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.layout.emit import Emit
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.forms import Epilogue, Matrix
from milepost.kernels.products.table import PRODUCTS, Product
from tests.kernels.attention_cases import Case, Step
from tests.kernels.choices import without
from tests.kernels.invariance import make_routing
from tests.kernels.orders import NUM_ROWS, SHAPES, compare, forms
from tests.kernels.quantised_cases import make_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


LIKE_MANY = (
    (2048, 4096),
    (9216, 2048),
    (264, 2048),
    (64, 2048),
    (64, 4096),
    (4096, 12288),
    (5120, 17408),
)
"""Weights [O, I] of models whose few rows after a hit are added up as many are."""


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
    assert not items.room.num_partials
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


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs Hopper, where cuBLAS was compared",
)


@needs_hopper
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        *(("raw", shape) for shape in LIKE_MANY),
        *(("fp8", shape) for shape in LIKE_MANY if shape[0] % 128 == 0 and shape[1] <= 4096),
    ],
    ids=str,
)
def test_few_rows_of_a_prefill_have_the_bits_of_many(form: str, shape: tuple[int, int]) -> None:
    weight, chip = dict(forms(*shape))[form], probe(torch.device("cuda"))
    rows = make_rows(2048, shape[1]).cuda().bfloat16()
    how = {"epilogue": Epilogue.PARTIALS, "order": SumOrder.LIKE_MANY}
    many = products.multiply(rows, weight, **how)
    different, are_split = {}, []
    for num in (1, 4, 16, 17, 33, 48, 64, 65, 72, 96, 128, 129, 200, 256, 384, 512):
        own = rows[-num:].contiguous()
        few = products.multiply(own, weight, **how)
        if not torch.equal(few, many[-num:]):
            product = Product(Matrix.of(weight, how["order"]), num, how["epilogue"])
            choice = PRODUCTS.choose(product, chip)
            different[num] = "none" if choice is None else f"{choice.kernel.name}: {choice.order}"
        are_split.append(products.multiply(own, weight, epilogue=Epilogue.PARTIALS).dim() == 3)
    assert different == {}
    assert any(are_split) or shape[0] > 8192, "a decode's sums are in parts"


@needs_hopper
def test_few_tokens_of_a_prefill_have_the_bits_of_many_from_raw_experts() -> None:
    given = make_routing("raw", order=SumOrder.FREE)
    whole = products.mix(*given, order=SumOrder.LIKE_MANY)
    counts = (1, 4, 5, 16, 17, 32, 33, 64, 96, 128, 129, 192, 256, 264, 384, 512)
    own = {
        num: products.mix(*given.of(torch.arange(num, device="cuda")), order=SumOrder.LIKE_MANY)
        for num in counts
    }
    assert [num for num, each in own.items() if not torch.equal(each, whole[:num])] == []


@needs_hopper
@pytest.mark.parametrize("shape", [(2048, 4096), (4096, 12288), (264, 2048), (12352, 2048)])
def test_whole_sums_by_torch_have_the_bits_of_ours(shape: tuple[int, int]) -> None:
    """With torch's own settings, 65 to 256 rows of the first two shapes have other bits."""
    weight = replace(dict(forms(*shape))["raw"], order=SumOrder.FIXED)
    rows = make_rows(4096, shape[1]).cuda().bfloat16()
    with without("torch's GEMM, sums whole"):
        ours = products.multiply(rows, weight)
    counts = (65, 74, 77, 98, 110, 128, 129, 176, 200, 224, 500, 512, 1000, 2049, 4096)
    own = {num: products.multiply(rows[:num], weight) for num in counts}
    assert [num for num, each in own.items() if not torch.equal(each, ours[:num])] == []


@pytest.mark.parametrize("num_rows", [17, 64, 300])
def test_few_norms_of_a_prefill_have_the_bits_of_many(num_rows: int) -> None:
    hidden, delta = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
    scale = torch.rand(2048, device="cuda")
    how = {"emit": Emit.BOTH, "order": SumOrder.LIKE_MANY}
    total, normed = norm.add_norm(hidden, delta, scale, 1e-6, **how)
    own = slice(2048 - num_rows, None)
    few_total, few = norm.add_norm(hidden[own], delta[own], scale, 1e-6, **how)
    assert torch.equal(few_total, total[own])
    assert torch.equal(few.values, normed.values[own])


@needs_hopper
@pytest.mark.parametrize("num_new", [17, 60, 300])
def test_tokens_after_a_hit_attend_as_in_a_cold_run(num_new: int) -> None:
    """The same KV and queries: the cold run has them all, the hit the last ones."""
    how = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 256, "dtype": torch.bfloat16}
    case = Case(starts=(0,), lengths=(1300,), num_programs=132, order=SumOrder.LIKE_MANY, **how)
    cold = Step(case, "cuda")
    hit = Step(replace(case, starts=(1300 - num_new,), lengths=(num_new,)), "cuda")

    def attend(step: Step, items: AttentionItems) -> torch.Tensor:
        query, gate = (None if each is None else each[-len(step.query) :] for each in given)
        work = step.on_device(items)
        return run.attend(query.contiguous(), gate.contiguous(), cold.kv(), work, 256**-0.5)

    given = cold.query, cold.gate
    assert torch.equal(attend(hit, hit.items()), attend(cold, cold.items())[-num_new:])
    hit.case = replace(hit.case, order=SumOrder.FREE)
    assert hit.items().room.num_partials, "without it tiles are cut"


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_likeliest_tokens_are_the_same_beside_other_rows(num_rows: int) -> None:
    logits = torch.randn(num_rows, 151_936, device="cuda").bfloat16()
    alone = torch.cat([sampling.argmax(row[None]) for row in logits[:8]])
    assert torch.equal(sampling.argmax(logits)[:8], alone)
