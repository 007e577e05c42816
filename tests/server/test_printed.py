"""Commands that pages show with `$` run as they stand, and print what the page says.

In a page's output `...` stands for anything, also for lines. Commands of ours run in this process,
all others in a shell, and those for a server meet one of the embedded model.
"""

from __future__ import annotations

import io
import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from milepost import demo
from milepost.cli.display import Screen
from milepost.cli.main import main
from tests.server.conftest import serving

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ADDRESS = "http://127.0.0.1:8000"
METER = re.compile(r"^[━─]+ ", re.M)


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of a page, with its output there."""

    page: str
    command: str
    output: str

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.command.split())[:60]}"


def shown(page: Path) -> Iterator[Shown]:
    """Yields the commands of a page's blocks of code."""
    for block in re.findall(r"^```\w*\n(\$ .*?)^```", page.read_text(), re.S | re.M):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = iter(part.splitlines())
            command = next(lines)
            while command.endswith("\\") or command.count("'") % 2:
                command += "\n" + next(lines)
            yield Shown(page.name, command, "\n".join(lines).strip())


ALL = [each for page in PAGES for each in shown(page)]


def matches(printed: str, said: str) -> bool:
    """Whether a text is what a page says, where `...` stands for anything."""
    pattern = re.escape(said).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


@pytest.fixture(scope="module")
def server():
    """A server of the embedded model, as `milepost serve` makes it."""
    with serving(None, "--served-model-name", "milepost-tiny") as server:
        yield server


@pytest.fixture(scope="module")
def outputs(server, tmp_path_factory):
    """What each command prints. A page's commands run in order, in one folder; a simulation that
    several pages show runs once."""
    found, simulated = {}, {}
    for each, folder in placed(tmp_path_factory):
        known = simulated if each.command.startswith("milepost simulate") else {}
        if each.command not in known:
            known[each.command] = run(each, server.url, folder)
        found[each] = known[each.command]
    return found


def placed(made) -> Iterator[tuple[Shown, Path]]:
    """Each command with a folder in which the repository's files are."""
    for page, commands in itertools.groupby(ALL, key=lambda each: each.page):
        folder = made.mktemp(page.removesuffix(".md"))
        for file in ROOT.iterdir():
            if not file.name.startswith(".") and file.name != "out":
                (folder / file.name).symlink_to(file)
        yield from ((each, folder) for each in commands)


def run(given: Shown, url: str, folder: Path) -> str:
    command = given.command.replace(ADDRESS, url)
    ours = re.match(r"(milepost|make demo)\b", command)
    if ours is None:
        script = f"set -o pipefail; {command}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout
    text = io.StringIO()
    screen = Screen(answers=text, reports=Console(file=text, width=150), clock=lambda: 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if ours[1] == "make demo":
            patch.setattr(demo, "Screen", lambda **_: screen)
            demo.main()
        else:
            assert main(words(command)[1:], screen=screen) == 0, (command, text.getvalue())
    return METER.sub("", "\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def words(command: str) -> list[str]:
    """The arguments that a shell makes of a command line."""
    script = f"printf '%s\\0' {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("given", ALL, ids=str)
def test_a_command_prints_what_its_page_says(outputs, given):
    printed = outputs[given]
    assert matches(printed, given.output), (
        f"{given.command}\n\n{printed}\n\nis not\n\n{given.output}"
    )


def test_there_are_commands_on_the_pages_that_people_meet_first():
    counts = {page: len(list(each)) for page, each in itertools.groupby(ALL, lambda e: e.page)}
    assert counts["README.md"] >= 5
    assert counts["server.md"] >= 5


@pytest.mark.parametrize(
    ("printed", "said"),
    [("a\nb\nc\n", "a\n...\nc"), ("took 3.2 s\n", "took ... s"), ("a (b)", "a (b)")],
)
def test_dots_stand_for_anything(printed, said):
    assert matches(printed, said)
    assert not matches(printed + "more", said)


COMMAND = re.compile(
    r"(?:\.venv/bin/|/\S*/)?(?:milepost|python3?|pip|curl|make|docker|serve|vllm-router)(?: |$)"
)
ELSEWHERE = {
    r"make (?!demo)|\.venv/bin/pip|python3 -m venv": "CI runs these targets, or makes environments",
    r"pip install|docker|/opt/milepost|pip\b": "installs or builds",
    r"python bench/": "a benchmark: minutes, a GPU, or traces",
    r"python tools/": "tests/tools",
    r"milepost (serve|chat)\b|\.venv/bin/milepost serve": "parsed by tests/cli; the fixture serves",
    r"vllm-router|serve run|python -m dynamo|curl .*(10\.0|:8090|:30000)": "programs of others",
    r"curl .*keys\.txt": "tests/server/test_callers.py",
    r"milepost simulate (agent-dev|TRACE|trace\.jsonl)": "traces that are not in the repository",
    r"milepost simulate agents --sessions 96": "minutes",
    r"milepost (kernels|verify) MODEL|milepost run-batch": "tests/cli, tests/server",
    r"milepost plan": "tests/engine/test_plan.py",
    r"milepost bench": "tests/load",
    r"python shallow_first": "tests/cli/test_simulate.py",
}
"""Commands that are not run here, by what they begin with, and why."""


def others(page: Path) -> Iterator[str]:
    """Yields the lines of a page that are commands without `$`."""
    is_block = False
    for line in page.read_text().splitlines():
        is_block ^= line.startswith("```")
        if (is_block or line.startswith("    ")) and COMMAND.match(line.strip()):
            yield line.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_other_command_has_a_reason(page):
    assert [line for line in others(page) if not any(re.match(e, line) for e in ELSEWHERE)] == []
