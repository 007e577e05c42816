"""The core runs without each annex: in a copy of the repository that lacks the annex's folder.

Not of every run, since each takes the core's tests anew: `make test-nightly`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.test_imports import ANNEXES, COMMANDS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
CORE_TESTS = (
    *("cache", "scheduler", "speculative", "kernels", "layers", "models", "parallel", "runner"),
    *("tiers", "engine", "server"),
)
REACH_ANNEXES = ("cache", "scheduler", "speculative", "parallel", "runner", "tiers", "engine")
"""Folders of tests that run, like `server`, if all annexes are gone. Kernels, layers and models
could ask for none, so their tests are only collected.
"""
ASK_FOR_ANNEXES = (
    *("parallel/test_team.py", "engine/loop", "engine/processes", "engine/test_llm.py"),
    *("server/test_openai_client.py", "server/test_operation.py", "server/test_callers.py"),
)
"""Tests that run if one annex is gone: those of the modules that ask for annexes."""
SERVED = {
    "disaggregation": ["test_disaggregation.py"],
    "kv_events": ["test_kv_events.py"],
    "load": ["test_bench.py", "test_bench_elsewhere.py"],
    "page": ["test_page.py", "test_page_browser.py"],
}
"""Tests of an annex among the server's."""


def without(gone_annexes: Sequence[str], folder: Path) -> Path:
    """Returns a copy of the repository that lacks these annexes and their tests."""
    gone: list[str] = []
    for annex in gone_annexes:
        gone += [f"src/milepost/{annex}", f"tests/{annex}", f"tests/test_{annex}.py"]
        gone += [f"src/milepost/cli/{name}.py" for name, of in COMMANDS.items() if of == annex]
        gone += [f"tests/server/{name}" for name in SERVED.get(annex, ())]

    def ignored(parent: str, names: list[str]) -> list[str]:
        inside = Path(parent).relative_to(ROOT)
        return [
            name
            for name in names
            if name == "__pycache__" or str(inside / name) in gone or name.startswith(".")
        ]

    for name in ("src", "tests", "docs", "bench", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def run(copy: Path, *arguments: str) -> None:
    """Runs pytest in a copy of the repository, and shows the end of its report if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("annex", sorted(ANNEXES))
def test_the_core_runs_without(annex, tmp_path):
    copy = without([annex], tmp_path)
    run(copy, "--collect-only", *(f"tests/{name}" for name in CORE_TESTS))
    run(copy, "-m", "not nightly and not slow", *(f"tests/{name}" for name in ASK_FOR_ANNEXES))


def test_the_core_runs_alone(tmp_path):
    copy = without(sorted(ANNEXES), tmp_path)
    folders = [f"tests/{name}" for name in (*REACH_ANNEXES, "server")]
    run(copy, "-m", "not nightly and not slow", "-n", "2", "--dist", "loadfile", *folders)


@pytest.mark.parametrize(("command", "annex"), [("simulate", "simulator"), ("bench", "load")])
def test_a_command_without_its_annex_says_what_is_missing(command, annex, tmp_path):
    copy = without([annex], tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    asked = [sys.executable, "-m", "milepost", command, "--limit", "3"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"milepost {command} needs the annex milepost.{annex}, which is not" in " ".join(
        done.stderr.split()
    )
