"""Steps that verify through a runner: what they leave and answer, and the rows of their records."""

from __future__ import annotations

import pytest
import torch
from tests.runner.test_arrays import sequence
from tests.runner.verifying import (
    NUM_SLOTS,
    TOKENS,
    assert_drafts_leave_what_tokens_do,
    open_pools,
    part,
    run,
)

from milepost.models.folder import EMBEDDED_MODEL
from milepost.models.loading import LoadOptions, load_model
from milepost.runner.plain import PlainExecutor
from milepost.runner.pool_shape import PoolShape
from milepost.runner.runner import Runner
from milepost.runner.tables import RecordRows
from milepost.scheduler.plans import SequencePlan, StepPlan

CPU = torch.device("cpu")


def drafting(number: int, num_drafts: int, fold: int = 0) -> SequencePlan:
    length = num_drafts + 1
    return sequence(70, [5] * length, number, num_drafts=num_drafts, fold=fold)


def rows_of(rows: RecordRows, *sequences: SequencePlan, ended: tuple[int, ...] = ()) -> list[int]:
    rows.follow(StepPlan(sequences=sequences, ended=ended))
    return rows.rows(sequences)


def test_a_row_is_kept_until_it_is_folded():
    rows = RecordRows(2)
    plain = sequence(70, [5], 3)
    assert rows_of(rows, drafting(1, 2), plain) == [0, -1]
    assert rows_of(rows, plain) == [-1], "others run ahead meanwhile"
    assert rows_of(rows, drafting(3, 1), drafting(1, 0, fold=2)) == [1, 0]
    assert rows_of(rows, drafting(4, 1), drafting(3, 3)) == [0, 1]
    assert rows_of(rows, drafting(5, 1), ended=(4,)) == [0]


def test_rows_know_how_many_drafts_were_taken():
    rows, plain = RecordRows(2), sequence(70, [5], 3)

    def taken(*sequences: SequencePlan, ended: tuple[int, ...] = ()) -> list[int]:
        rows_of(rows, *sequences, ended=ended)
        return rows.recorded(sequences)

    def at(start: int, number: int, num_drafts: int) -> SequencePlan:
        return sequence(start, [5] * (num_drafts + 1), number, num_drafts=num_drafts)

    assert taken(at(70, 1, 3), plain) == [-1, -1]
    assert taken(plain) == [-1], "others run ahead meanwhile"
    assert taken(at(73, 1, 2), at(70, 2, 1)) == [2, -1]
    assert taken(at(74, 1, 0), at(72, 2, 1)) == [0, 1]
    assert taken(at(75, 1, 0)) == [-1], "its step before had no drafts"
    assert taken(at(72, 2, 0), ended=(2,)) == [-1]


def test_a_row_that_is_read_is_nobody_elses_in_that_step():
    rows = RecordRows(1)
    rows_of(rows, drafting(1, 2))
    with pytest.raises(AssertionError, match="V4"):
        rows_of(rows, drafting(1, 0, fold=1), drafting(2, 1))


def test_what_was_not_recorded_is_not_folded():
    with pytest.raises(AssertionError, match="V3"):
        rows_of(RecordRows(2), drafting(1, 0, fold=1))


@pytest.fixture(scope="module")
def model():
    options = {"dtype": torch.float64, "device": CPU, "load_format": "auto", "seed": 0}
    return load_model(EMBEDDED_MODEL, LoadOptions(**options))[0]


def open_runner(model, num_drafts: int) -> Runner:
    pools = open_pools(model, num_drafts, CPU)
    executor = PlainExecutor(model, pools, num_requests=4, max_model_len=256)
    return Runner(executor, pools, num_slots=NUM_SLOTS)


def test_accepted_drafts_leave_what_tokens_do(model):
    assert_drafts_leave_what_tokens_do(open_runner(model, 0), open_runner(model, 3), 1e-10)


def test_a_fold_starts_where_the_state_is(model):
    runner = open_runner(model, 2)
    run(runner, part(0, 70, 1, slot_in=0, new_pages=(4, 5)))
    run(runner, sequence(70, TOKENS[70:73], 1, num_drafts=2, new_pages=()))
    with pytest.raises(AssertionError, match="S4"):
        run(runner, part(73, 74, 1, fold=1))


def test_a_drafts_record_takes_half_a_mebibyte_of_qwen3_next():
    """With 36 layers of 16 key heads and 32 value heads of 128."""
    from milepost.layers.context import RecurrentSpec

    spec = RecurrentSpec(
        conv_shape=(8192, 3),
        recurrent_shape=(32, 128, 128),
        grid=64,
        record_size=8192 + 64,
    )
    shape = PoolShape(
        specs=(spec,) * 36,
        page_size=64,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        num_record_rows=64,
        num_drafts=3,
    )
    assert 0.5 < shape.record_token_bytes / 2**20 < 0.6
    assert shape.record_bytes == 64 * 3 * shape.record_token_bytes
