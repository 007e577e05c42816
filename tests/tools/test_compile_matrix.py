"""The matrix of kernels and chips finds what it is for, and sees what an engine launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytest.importorskip("triton", reason="kernels are compiled by the package triton")
REPOSITORY = Path(__file__).parents[2]
OTHERS = ("sampling.", "vision.")
"""Kernels that are not measured by their shapes."""
HOPPER = REPOSITORY / "tools" / "compile_matrix" / "hopper.jsonl"
"""Shapes that were measured on an H200 (docs/benchmarks.md)."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    program = Path(__file__).with_name("planted.py")
    return json.loads(forked.run_script(program, compiles=True).splitlines()[-1])


def test_an_instruction_of_a_later_chip_is_found(found):
    assert "error" in found["planted"]["waits sm_80"].lower()
    assert found["planted"]["waits sm_90"] == ""


def test_a_tile_too_large_for_a_chip_is_found(found):
    assert "bytes of shared memory, sm_89 has 101376" in found["planted"]["holds sm_89"]
    assert found["planted"]["holds sm_80"] == ""


def test_a_fresh_run_that_was_stopped_goes_on_where_it_was(found):
    assert found["resumed"] == [2, 1, 2]


def test_code_says_what_a_kernel_does_and_not_where_it_stands(found):
    assert "griddepcontrol.wait" in found["code"]
    assert ".loc" not in found["code"]
    assert "planted.py" not in found["code"]


def test_on_hopper_kernels_are_cut_as_they_were_measured(found):
    measured = [json.loads(line) for line in HOPPER.read_text(encoding="utf-8").splitlines()]
    launched = [row for row in found["hopper"] if not row["kernel"].startswith(OTHERS)]
    assert len(launched) >= 50
    names = {row["kernel"] for row in launched}
    assert {
        "attention.hopper.wide._attend_kernel",
        "recurrent.hopper.delta_decode._decode_kernel",
        "products.hopper.small_m._gemm_kernel",
        "products.portable.grouped_large._up_kernel",
    } <= names
    assert [row for row in launched if row not in measured] == []


def test_no_prefill_launches_what_was_not_compiled_before_the_first_step(found):
    assert found["late"] == []
