"""The tables of recurrent kernels: which serves what, and that the command and a page say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from milepost.kernels.platform import device
from milepost.kernels.platform.device import CHIPS, hopper_kernels
from milepost.kernels.recurrent import (
    TABLES,
    MixerPart,
    MixerSizes,
    RecurrentRule,
    needs_arrivals,
)
from milepost.kernels.recurrent.table import DECODES, OUTPUTS, STATES, VERIFIES, is_reached
from milepost.models.kernel_list import list_kernels

MODELS = Path(__file__).parents[2] / "bench" / "models"
H200, A100 = CHIPS["sm_90"][1], CHIPS["sm_80"][1]
DELTA = MixerSizes(rule=RecurrentRule.GATED_DELTA, units=16, group=2, shared=128, own=128, taps=4)
KIMI = DELTA._replace(rule=RecurrentRule.KDA, units=32, group=1, gates_by_sigmoid=True)
NEMOTRON = DELTA._replace(rule=RecurrentRule.MAMBA2, units=8, group=8, own=64)
OLMO = DELTA._replace(units=30, group=1, shared=96, own=192)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """As with a Triton whose Gluon is known, whatever is installed here."""
    monkeypatch.setattr(device, "triton_version", lambda: (3, 6))
    for table in TABLES.values():
        table.forget()


def serves(table, sizes: MixerSizes, num: int, chip=H200, **others) -> str:
    part = MixerPart(sizes=sizes, num=num, **others)
    return table.choose(part, chip).kernel.name


@pytest.mark.parametrize("sizes", [DELTA, KIMI])
def test_hopper_runs_all_steps_of_square_states(sizes):
    for num in (1, 2, 64, 500):
        assert serves(DECODES, sizes, num) == "delta decode, Hopper"
        assert serves(VERIFIES, sizes, num) == "delta verify, Hopper"
        assert serves(DECODES, sizes, num, A100) == "step"
        assert serves(DECODES, sizes, num, is_reached=False) == "step"
    with hopper_kernels(False):
        assert serves(DECODES, sizes, 1) == "step"


def test_outputs_gated_by_sigmoids_are_any_chips():
    """States have no gates, so Hopper's kernel serves those."""
    gated = DELTA._replace(gates_by_sigmoid=True)
    assert serves(DECODES, gated, 1) == serves(VERIFIES, gated, 1) == "step"
    assert serves(STATES, gated, 8192) == "chunk_h, Hopper"
    assert serves(OUTPUTS, gated, 8192) == "chunk_o"


def test_other_states_are_any_chips():
    assert serves(DECODES, OLMO, 1) == serves(VERIFIES, OLMO, 1) == "step"
    assert serves(STATES, OLMO, 8192) == "chunk_h"
    assert serves(OUTPUTS, OLMO, 8192) == "chunk_o"


def test_only_steps_of_mamba2_that_verify_have_a_kernel_for_hopper():
    assert [serves(DECODES, NEMOTRON, num) for num in (1, 500)] == ["step", "step"]
    assert serves(VERIFIES, NEMOTRON, 1) == "mamba2 verify, Hopper"
    assert serves(VERIFIES, NEMOTRON._replace(shared=256), 1) == "step"


@pytest.mark.parametrize("sizes", [DELTA, KIMI])
def test_long_prefills_go_through_tma(sizes):
    for num, where in ((4096, ""), (4097, ", Hopper")):
        assert serves(STATES, sizes, num) == f"chunk_h{where}"
        assert serves(OUTPUTS, sizes, num) == "chunk_o"
    assert serves(STATES, sizes, 8192, element_bytes=4) == "chunk_h"


def test_only_programs_that_wait_for_others_are_sent_arrivals():
    assert needs_arrivals(NEMOTRON, 500, H200)
    assert needs_arrivals(DELTA, 4, H200)
    assert not needs_arrivals(DELTA, 5, H200)
    assert not needs_arrivals(DELTA, 1, A100)
    assert not needs_arrivals(KIMI, 1, H200)


def test_tma_reaches_states_of_float32_whose_slots_lie_apart_by_whole_lines():
    pool = torch.zeros(3, 2, 128, 128)
    assert is_reached(pool)
    assert not is_reached(pool.bfloat16())
    assert not is_reached(
        torch.zeros(3, 2 * 128 * 128 + 4)[:, : 2 * 128 * 128].unflatten(1, (2, -1))
    )


def test_rows_have_names_of_their_own():
    for table in TABLES.values():
        assert len({kernel.name for kernel in table.kernels}) == len(table.kernels)


def test_the_command_lists_a_models_recurrences():
    rows = list(list_kernels(str(MODELS / "kimi-linear-48b-a3b"), "sm_90", None))
    first = next(index for index, row in enumerate(rows) if row[0].endswith("decode"))
    name, shape, *served = rows[first]
    assert name.startswith("layer 0 ")
    assert shape == "32 heads, 128 x 128"
    assert served == ["from 1", "delta decode, Hopper", "4 rows, warps", ""]
    states = next(index for index, row in enumerate(rows) if row[0].endswith("states"))
    assert [row[2:4] for row in rows[states : states + 2]] == [
        ("1 to 4096", "chunk_h"),
        ("from 4097", "chunk_h, Hopper"),
    ]
    assert rows[states][-1] == "chunk_h, Hopper: up to 4096 tokens"


def test_the_command_lists_attention_to_windows_apart():
    rows = list(list_kernels(str(MODELS / "lfm3-1.7b"), "sm_90", None))
    served = {row[1]: row[2:] for row in rows if row[1].endswith("16-bit pages")}
    assert served["16 / 4 heads of 128, 16-bit pages"][1] == "wide, Hopper"
    in_windows = served["16 / 4 heads of 128, windows of 256, 16-bit pages"]
    assert (in_windows[1], in_windows[3]) == ("tiles", "wide, Hopper: a sliding window")
