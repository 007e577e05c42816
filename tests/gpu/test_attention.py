"""Attention's kernels on a GPU at real shapes, against the reference in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.kernels.layout.batch import Capacity
from tests.kernels.attention_cases import Case, Step, build_projection
from tests.numbers import relative_error

attention = pytest.importorskip("milepost.kernels.attention.run", exc_type=ImportError)
preparation = pytest.importorskip(
    "milepost.kernels.attention.portable.prepare", exc_type=ImportError
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LARGE = Case(
    starts=(),
    lengths=(),
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    dtype=torch.bfloat16,
    num_programs=132,
)
CASES = {
    "decodes": replace(LARGE, starts=(0, 63, 64, 1000, 5000), lengths=(1,) * 5),
    "suffix": replace(LARGE, starts=(5000,), lengths=(64,)),
    "prefills": replace(LARGE, starts=(0, 0, 1024), lengths=(1, 700, 200)),
    "four_kv_heads": replace(LARGE, starts=(900, 10), lengths=(1, 300), num_kv_heads=4),
    "shared": replace(LARGE, starts=(2100, 2050, 2060) * 12, lengths=(1,) * 36, num_sharing=2048),
    "head_dim_128": replace(LARGE, starts=(900, 10), lengths=(1, 300), head_dim=128),
    "head_dim_64": replace(LARGE, starts=(900, 10), lengths=(1, 300), head_dim=64),
    "odd_head_dim": replace(LARGE, starts=(900, 10), lengths=(1, 300), head_dim=80),
    "small_pages": replace(LARGE, starts=(900, 10), lengths=(1, 300), page_size=16),
    "large_pages": replace(LARGE, starts=(900, 10), lengths=(1, 300), page_size=1024),
    "odd_groups": replace(LARGE, starts=(900, 10), lengths=(1, 300), num_heads=6),
    "few_rows": replace(LARGE, starts=(900, 10), lengths=(1, 300), wide_rows=64),
    "nemotron": replace(
        LARGE,
        starts=(900, 5000, 10),
        lengths=(1, 1, 300),
        num_heads=32,
        head_dim=128,
        has_gate=False,
    ),
    "gates_of_heads": replace(
        LARGE, starts=(900, 5000, 10), lengths=(1, 1, 300), head_dim=128, gates_heads=True
    ),
    "narrow_heads_without_gates": replace(
        LARGE, starts=(900, 10), lengths=(1, 300), head_dim=64, has_gate=False
    ),
    "drafts": replace(LARGE, starts=(0, 63, 5000, 64) * 9, lengths=(4, 3, 4, 0) * 9, num_drafts=3),
    "shared_drafts": replace(
        LARGE,
        starts=(2100, 2050, 2060) * 12,
        lengths=(4, 1, 2) * 12,
        num_sharing=2048,
        num_drafts=3,
    ),
    "window": replace(
        LARGE, starts=(0, 255, 256, 319, 320, 90_000), lengths=(1,) * 6, head_dim=128, window=256
    ),
    "windows_of_prefills": replace(
        LARGE, starts=(0, 1000, 320), lengths=(700, 300, 3), head_dim=128, window=256
    ),
    "window_over_small_pages": replace(
        LARGE, starts=(900, 10), lengths=(1, 300), page_size=16, window=33
    ),
    "float16": replace(LARGE, starts=(900, 10), lengths=(1, 300), dtype=torch.float16),
    "float32": replace(LARGE, starts=(900, 10), lengths=(1, 60), dtype=torch.float32, wide_rows=64),
    "float32_narrow_heads": Case(starts=(900, 10), lengths=(1, 60), head_dim=64),
}
ROOM = Capacity(num_tokens=512, num_sequences=64)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attend_matches_reference(case: Case) -> None:
    step = Step(case, "cuda")
    assert relative_error(attend(step), step.expected()) < BOUNDS[case.dtype]


@pytest.mark.parametrize(
    "name",
    [
        *("decodes", "suffix", "prefills", "shared", "head_dim_64", "odd_head_dim"),
        *("small_pages", "odd_groups", "few_rows", "drafts", "float16"),
    ],
)
def test_attend_to_float8_matches_reference(name: str) -> None:
    step = Step(replace(CASES[name], has_float8=True), "cuda")
    assert relative_error(attend(step), step.expected()) < BOUNDS[torch.bfloat16]


DECODES = replace(CASES["decodes"], starts=(0, 1, 63, 64, 65, 1000, 90_000), lengths=(1,) * 7)


@pytest.mark.parametrize("least_rows", [8, 16])
@pytest.mark.parametrize(
    "case",
    [
        DECODES,
        *(replace(DECODES, page_size=page_size) for page_size in (16, 32, 128, 1024)),
        *(replace(DECODES, num_heads=num_heads) for num_heads in (2, 6, 8, 32)),
        replace(DECODES, num_kv_heads=4, lengths=(2, 1, 2, 1, 2, 1, 2)),
        replace(DECODES, lengths=(2, 1, 2, 1, 2, 1, 2)),
        replace(DECODES, has_gate=False),
        replace(DECODES, gates_heads=True),
        replace(DECODES, dtype=torch.float16),
        replace(DECODES, capacity=Capacity(num_tokens=16, num_sequences=8)),
    ],
    ids=lambda case: (
        f"{case.num_heads}-{case.num_kv_heads}-{case.page_size}-{case.dtype}-{case.lengths[0]}"
        if isinstance(case, Case)
        else str(case)
    ),
)
def test_decodes_over_float8_match_reference(case: Case, least_rows: int) -> None:
    step = Step(replace(case, has_float8=True, least_rows=least_rows), "cuda")
    items = step.items()
    assert items.tiling.shapes.narrow_rows >= least_rows
    assert items.room.num_partials, "the longest is cut"
    assert relative_error(attend(step), step.expected()) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(
    "name", ["suffix", "prefills", "shared", "four_kv_heads", "head_dim_128", "head_dim_64"]
)
def test_attend_to_float8_that_is_dequantised_first(name: str) -> None:
    step = Step(replace(CASES[name], has_float8=True, max_dequantised=10**4), "cuda")
    assert step.items().room.num_dequantised
    assert relative_error(attend(step), step.expected()) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("name", ["decodes", "suffix", "shared"])
def test_a_graph_serves_other_steps_of_its_capacity(name: str) -> None:
    """Captured with one step's items, replayed with another's in their place."""
    step = Step(replace(CASES[name], capacity=ROOM), "cuda")
    other = replace(CASES["prefills"], lengths=(1, 100, 200), capacity=ROOM)
    room = step.on_device(Step(other, "cuda").items())
    arguments = (step.query, step.gate, step.kv())
    scale = step.case.head_dim**-0.5
    for part in ("narrow", "wide"):
        getattr(room, part).zero_()
    attention.attend(*arguments, room, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention.attend(*arguments, room, scale)
    items = step.items()
    for part in ("narrow", "wide", "bases"):
        getattr(room, part).copy_(torch.from_numpy(getattr(items, part)))
    output.fill_(torch.nan)
    graph.replay()
    assert relative_error(output[: step.num_tokens], step.expected()) < 1e-2


def attend(step: Step) -> torch.Tensor:
    items = step.on_device(step.items())
    scale = step.case.head_dim**-0.5
    output = attention.attend(step.query, step.gate, step.kv(), items, scale)
    return output[: step.num_tokens]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 64, 3000])
@pytest.mark.parametrize(("half", "has_norms"), [(32, True), (64, False), (0, False)])
def test_prepare_matches_layer(
    half: int, has_norms: bool, num_tokens: int, dtype: torch.dtype
) -> None:
    sizes = {"num_heads": 16, "head_dim": 256, "half": half, "has_norms": has_norms}
    given = build_projection(num_tokens, **sizes, dtype=dtype, device="cuda")
    query, pool = given.expected()
    actual = preparation.prepare(
        given.projected,
        given.norm_scale,
        given.eps,
        given.angles,
        given.kv,
        given.kv_rows,
        num_heads=given.num_heads,
    )
    assert relative_error(actual, query) < BOUNDS[dtype]
    assert torch.equal(given.pool.isnan(), pool.isnan())
    if num_tokens > 1:
        assert relative_error(given.pool.nan_to_num(), pool.nan_to_num()) < BOUNDS[dtype]


def test_prepare_writes_float8_as_the_reference() -> None:
    """Bit for bit, but where the norm's own rounding falls beside a boundary."""
    given = build_projection(300, num_heads=16, head_dim=256, has_float8=True, device="cuda")
    _, pool = given.expected()
    preparation.prepare(
        given.projected,
        given.norm_scale,
        given.eps,
        given.angles,
        given.kv,
        given.kv_rows,
        num_heads=given.num_heads,
    )
    own, expected = (each.float() for each in (given.pool, pool))
    assert torch.equal(own.isnan(), expected.isnan())
    differs = own.nan_to_num() != expected.nan_to_num()
    assert differs.sum() < 1e-3 * (~expected.isnan()).sum()
    assert relative_error(own.nan_to_num(), expected.nan_to_num()) < 1e-2
