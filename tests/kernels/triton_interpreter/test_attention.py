"""Attention's kernels on CPU, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.kernels.attention import pages, table, tiles
from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.portable.tiles import AttentionTile, cut
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder
from tests.batches import spread
from tests.kernels.attention_cases import Case, Step, build_projection
from tests.numbers import relative_error

attention = pytest.importorskip("milepost.kernels.attention.run", exc_type=ImportError)
portable = pytest.importorskip("milepost.kernels.attention.portable.attend", exc_type=ImportError)
preparation = pytest.importorskip(
    "milepost.kernels.attention.portable.prepare", exc_type=ImportError
)

CASES = {
    "decodes": Case(starts=(0, 1, 63, 64, 200), lengths=(1,) * 5),
    "split_decode": Case(starts=(1000,), lengths=(1,)),
    "prefills": Case(starts=(0, 0, 0), lengths=(1, 70, 200)),
    "suffixes": Case(starts=(130, 300, 64), lengths=(20, 70, 3)),
    "mixed": Case(starts=(300, 0, 129, 128), lengths=(1, 150, 1, 40)),
    "small_pages": Case(starts=(300, 100), lengths=(1, 100), page_size=16),
    "large_pages": Case(starts=(300, 100), lengths=(1, 100), page_size=256),
    "odd_head_dim": Case(starts=(300, 100), lengths=(1, 100), head_dim=24),
    "odd_groups": Case(starts=(300, 100), lengths=(1, 100), num_heads=6, head_dim=16),
    "one_kv_head": Case(starts=(300, 100), lengths=(1, 60), num_heads=20, num_kv_heads=1),
    "large_heads": Case(starts=(300, 100), lengths=(1, 30), head_dim=256),
    "few_rows": Case(starts=(300, 100), lengths=(1, 100), wide_rows=64),
    "shared": Case(starts=(700, 650, 640, 900, 641), lengths=(1,) * 5, num_sharing=640),
    "shared_and_prefill": Case(
        starts=(700, 650, 640, 900, 641), lengths=(1, 1, 2, 1, 11), num_sharing=640
    ),
    "gates_of_heads": Case(starts=(700, 650, 0), lengths=(1, 1, 70), gates_heads=True),
    "gates_of_odd_heads": Case(
        starts=(300, 10), lengths=(1, 100), num_heads=6, head_dim=24, gates_heads=True
    ),
    "no_gate": Case(starts=(700, 650, 0), lengths=(1, 1, 70), has_gate=False),
    "drafts": Case(starts=(90, 5, 64, 128, 63), lengths=(4, 1, 0, 3, 2), num_heads=8, num_drafts=3),
    "one_program": Case(starts=(600, 100), lengths=(1, 100), num_programs=1),
    "window": Case(starts=(0, 63, 64, 99, 1000), lengths=(1,) * 5, window=100),
    "windows_of_prefills": Case(starts=(0, 130, 300, 64), lengths=(250, 20, 70, 3), window=64),
    "window_of_drafts": Case(starts=(200, 5), lengths=(4, 3), num_drafts=3, window=70),
    "window_over_small_pages": Case(starts=(300, 40), lengths=(1, 100), window=33, page_size=16),
    "window_in_pieces": Case(starts=(1500, 900), lengths=(1, 200), window=700),
    "window_of_one": Case(starts=(300, 0), lengths=(1, 70), window=1, head_dim=24),
}

CHIPS = {
    "sm_89": Chip(arch="sm_89", capability=(8, 9), is_amd=False, num_sms=58, shared_bytes=99 << 10),
    "gfx942": Chip(
        arch="gfx942", capability=(0, 0), is_amd=True, num_sms=304, shared_bytes=64 << 10
    ),
}
HOPPER = replace(
    CHIPS["sm_89"], arch="sm_90", capability=(9, 0), num_sms=132, shared_bytes=227 << 10
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attend_matches_reference(case: Case) -> None:
    assert error(case) < 1e-5


def test_a_tokens_partial_results_are_combined_alike_in_any_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a FIXED order, whichever tokens before it have none, however much of the prompt is in
    the step."""
    monkeypatch.setattr(tiles, "_LEAST_WIDE_UNITS", 1)
    case = Case(starts=(0, 1088), lengths=(70, 100), order=SumOrder.FIXED, num_programs=132)
    step, items = Step(case), Step(case).items()
    assert items.room.first_combined == 70
    assert items.room.num_combined == 170
    together = attend(step, items, slice(None))
    assert relative_error(together, step.expected()) < 1e-5
    for start, length in ((1088, 60), (1088, 100), (1152, 36)):
        alone = replace(step.case, starts=(start,), lengths=(length,))
        step.case = alone
        own = slice(70 + start - 1088, 70 + start - 1088 + length)
        rows, step.rows = step.rows, step.rows[1:]
        items = step.items()
        assert items.room.num_partials == 5 * length
        assert torch.equal(attend(step, items, own), together[own])
        step.case, step.rows = case, rows


def attend(step: Step, items: AttentionItems, own: slice) -> torch.Tensor:
    work, scale = step.on_device(items), step.case.head_dim**-0.5
    gate = None if step.gate is None else step.gate[own]
    return attention.attend(step.query[own], gate, step.kv(), work, scale)


@pytest.mark.parametrize("name", ["mixed", "shared", "suffixes", "window"])
def test_attend_with_room_for_more_matches_reference(name: str) -> None:
    capacity = Capacity(num_tokens=256, num_sequences=8)
    assert error(replace(CASES[name], capacity=capacity)) < 1e-5


def test_attend_in_half_precision_matches_reference() -> None:
    assert error(replace(CASES["mixed"], dtype=torch.float16)) < 2e-3


@pytest.mark.parametrize(
    "name", ["odd_head_dim", "shared", "drafts", "window", "prefills", "suffixes", "small_pages"]
)
def test_attend_to_float8_matches_reference(name: str) -> None:
    assert error(replace(CASES[name], has_float8=True)) < 1e-5


@pytest.mark.parametrize("name", ["suffixes", "small_pages"])
def test_attend_to_float8_that_is_dequantised_first(name: str) -> None:
    case = replace(CASES[name], has_float8=True, max_dequantised=40)
    assert Step(case).items().room.num_dequantised
    assert error(case) < 1e-5


def test_attend_to_float8_in_half_precision_matches_reference() -> None:
    case = replace(CASES["mixed"], dtype=torch.bfloat16, has_float8=True)
    assert error(case) < 4e-3


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attend_as_cut_for_chips_with_less_room(monkeypatch, head_dim: int, chip: Chip) -> None:
    for module in (attention, portable):
        monkeypatch.setattr(module, "probe", lambda _: chip)
    rows = table.wide_rows(head_dim, chip.shared_bytes)
    tile = AttentionTile(rows=rows, is_wide=True, head_dim=head_dim, dtype=torch.float16)
    tiles = cut(tile, chip)
    assert tiles.block < cut(tile, HOPPER).block
    assert tiles.shared_bytes(rows, head_dim) <= chip.shared_bytes
    case = Case(starts=(130, 40), lengths=(1, 37), head_dim=head_dim, page_size=16, wide_rows=rows)
    assert error(replace(case, dtype=torch.float16)) < 2e-3


def test_float8_of_large_heads_on_a_chip_without_float8(monkeypatch) -> None:
    """Half as many rows as in 16 bits: a thread of all of them spills 1,720 bytes."""
    chip = replace(HOPPER, arch="sm_80", capability=(8, 0), num_sms=108, shared_bytes=163 << 10)
    for module in (attention, portable):
        monkeypatch.setattr(module, "probe", lambda _: chip)
    rows = table.wide_rows(256, chip.shared_bytes, takes_apart=chip.unpacks_fp8)
    tile = AttentionTile(rows=rows, is_wide=True, head_dim=256, has_fp8_pages=True)
    assert (rows, cut(tile, chip).num_warps) == (64, 8)
    small = AttentionTile(rows=128, is_wide=True, head_dim=128, has_fp8_pages=True)
    assert cut(small, chip).block < cut(small._replace(has_fp8_pages=False), chip).block
    case = replace(CASES["large_heads"], dtype=torch.bfloat16, has_float8=True, wide_rows=rows)
    assert error(case) < 4e-3


def test_attend_without_boxes_matches_reference(monkeypatch) -> None:
    """As where there are more rows than TMA counts."""
    monkeypatch.setattr(pages, "_TMA_ROWS", 1)
    assert error(CASES["mixed"]) < 1e-5


@pytest.mark.parametrize("head_dim", [32, 24])
def test_pages_may_lie_far_apart(head_dim: int) -> None:
    """The last ones where 32 bits do not count the elements."""
    step = Step(replace(CASES["mixed"], head_dim=head_dim, dtype=torch.float16))
    step.pool = spread(step.pool[: step.tables.max() + 1])
    assert error_of(step) < 2e-3


def error(case: Case) -> float:
    return error_of(Step(case))


def error_of(step: Step) -> float:
    case = step.case
    items = step.on_device(step.items())
    output = attention.attend(step.query, step.gate, step.kv(), items, case.head_dim**-0.5)
    return relative_error(output[: step.num_tokens], step.expected())


@pytest.mark.parametrize("num_tokens", [1, 11, 37])
@pytest.mark.parametrize(("half", "has_norms"), [(4, True), (12, True), (4, False), (0, False)])
def test_prepare_matches_layer(monkeypatch, num_tokens: int, half: int, has_norms: bool) -> None:
    """One token to a program, and several."""
    monkeypatch.setattr(preparation, "_FEW_TOKENS", 16)
    given = build_projection(num_tokens, head_dim=24, half=half, has_norms=has_norms)
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
    assert relative_error(actual, query) < 1e-6
    assert torch.equal(given.pool.isnan(), pool.isnan())
    if num_tokens > 1:
        assert relative_error(given.pool.nan_to_num(), pool.nan_to_num()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_prepare_writes_float8_as_the_reference(dtype: torch.dtype) -> None:
    """Bit for bit, but where the norm's own rounding falls beside a boundary."""
    given = build_projection(11, head_dim=24, dtype=dtype, has_float8=True)
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
    own, expected = (each.view(torch.uint8).long() for each in (given.pool, pool))
    assert (own - expected).abs().max() <= 1
    assert (own != expected).sum() <= 2
    assert (expected != 0x7F).any()


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_float8_is_rounded_to_the_nearest_and_never_past_the_largest(scale: float) -> None:
    given = build_projection(3, head_dim=32, half=0, has_norms=False, has_float8=True)
    given.projected[:, 128:256].mul_(torch.logspace(-6, 3, 64).repeat(2))
    given.kv_scales.fill_(scale)
    given.kv_rows.copy_(torch.tensor([0, 1, -1]))
    _, pool = given.expected()
    preparation.prepare(
        given.projected,
        None,
        0.0,
        None,
        given.kv,
        given.kv_rows,
        num_heads=4,
    )
    assert torch.equal(given.pool.float().nan_to_num(), pool.float().nan_to_num())
    assert given.pool[0, :, :2].float().abs().max() == 448
