"""Tables that the documentation shows are those that `tools/tables.py` makes."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from milepost import LLM
from milepost.config import EngineConfig
from milepost.engine.metrics import TEXTS
from milepost.simulator.policies import POLICIES
from tests import forked

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("tables", ROOT / "tools" / "tables.py")
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)


@pytest.fixture(scope="module")
def memory() -> dict[str, str]:
    """What `memory_table.py` prints, in a forked process: to start one takes seconds."""
    path = ROOT / "tools" / "memory_table.py"
    return json.loads(forked.run_script(path, compiles=True).splitlines()[-1])


@pytest.mark.parametrize("page", tables.TABLES)
def test_a_page_has_the_tables_of_today(page, memory, monkeypatch):
    monkeypatch.setattr(tables, "memory", lambda: memory)
    if (ROOT / page).read_text(encoding="utf-8") != tables.filled(page):
        pytest.fail(f"{page} has older tables: run python tools/tables.py")


def test_every_place_for_a_table_is_filled():
    place = re.compile(r"<!-- made by tools/tables\.py: ([^>]*) -->")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = {
        path.relative_to(ROOT).as_posix(): set(place.findall(path.read_text(encoding="utf-8")))
        for path in pages
    }
    made = {page: set(made) for page, made in tables.TABLES.items()}
    assert {page: names for page, names in found.items() if names} == made


def test_a_flag_with_an_odd_help_stays_in_its_cell():
    assert tables.rows(("a", "b"), [("1", "")]) == "| a | b |\n| --- | --- |\n| 1 | |"
    assert tables._cell("a|b <c>") == r"a\|b &lt;c>"
    assert len(tables.flags(EngineConfig).splitlines()) == len(fields(EngineConfig)) + 2


def test_the_simulators_page_describes_each_policy():
    text = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Policies\n(.*?)^##", text, re.S | re.M)
    assert set(re.findall(r"^\| `([\w-]+)` \|", section, re.M)) == set(POLICIES)


def test_every_metric_of_an_engine_has_its_text_and_kind():
    with LLM(num_pages=64, num_slots=8, cache_host_gib=0.05, max_model_len=512) as llm:
        kinds = {metric.name.removeprefix("milepost:"): metric.kind for metric in llm.get_metrics()}
    assert set(kinds) <= set(TEXTS)
    said = {name: tables.LABELLED.get(name, {}).get("kind", "counter") for name in kinds}
    assert said == kinds
