"""Every script of bench/ and tools/ starts: nobody runs most of them from one week to the next, and
what they import may have another name by then."""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from milepost.engine.ending import without_main
from tests import forked

ROOT = Path(__file__).parents[2]
WITHOUT_ARGUMENTS = {
    "bench/core.py",
    "tools/count_lines.py",
    "tools/dashboards/__main__.py",
    "tools/memory_table.py",
    "tools/site.py",
    "tools/tables.py",
}
"""Scripts that would do their work if they were asked for help: these are only imported."""
ELSEWHERE = {"bench/ray_replicas.py": "ray"}
"""Packages that are not installed here."""
IMPORTED = (
    "tests.server.bombs",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "triton.experimental.gluon",
    "triton.testing",
)
"""Modules that several scripts import, and no server does."""


def scripts() -> list[str]:
    """The files that may be run, by their paths."""
    paths = [path for folder in ("bench", "tools") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(paths)}
    run = [path for path, text in texts.items() if "\nif __name__ ==" in text]
    return [path.relative_to(ROOT).as_posix() for path in run]


def run_all(scripts: list[str], folder: Path) -> None:
    """Runs scripts in processes forked from this one, as `python SCRIPT --help` does; each has a
    file with its output and one with its exit code."""
    for module in IMPORTED:
        import_module(module)
    for number, script in enumerate(scripts):
        output = folder / f"{number}.txt"
        process = get_context("fork").Process(target=_run, args=(script, output))
        process.start()
        process.join()
        (folder / f"{number}.code").write_text(str(process.exitcode))


def _run(script: str, output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    path = str(ROOT / script)
    sys.argv = [path, "--help"]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="imported" if script in WITHOUT_ARGUMENTS else "__main__")


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and output of each script, and of one whose imports are gone."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "broken.py").write_text("from milepost.cache import nothing_of_this_name")
    every = [*scripts(), str(folder / "broken.py")]
    with without_main():
        process = forked.context().Process(target=run_all, args=(every, folder))
        process.start()
    process.join()
    assert process.exitcode == 0
    return {
        Path(script).name if Path(script).is_absolute() else script: (
            int((folder / f"{number}.code").read_text()),
            (folder / f"{number}.txt").read_text(),
        )
        for number, script in enumerate(every)
    }


@pytest.mark.parametrize("script", scripts())
def test_a_script_starts_and_says_what_it_takes(script, ends):
    package = ELSEWHERE.get(script)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    code, output = ends[script]
    assert code == 0, output
    assert script in WITHOUT_ARGUMENTS or output.startswith("usage: "), output


def test_scripts_that_are_only_imported_take_no_arguments():
    texts = {script: (ROOT / script).read_text(encoding="utf-8") for script in WITHOUT_ARGUMENTS}
    assert not [script for script, text in texts.items() if "argparse" in text]


def test_a_script_whose_imports_are_gone_is_found(ends):
    code, output = ends["broken.py"]
    assert code == 1
    assert "cannot import name 'nothing_of_this_name'" in output
