"""Files that the documentation names are where it says, and no module is without a place in it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from milepost.cache.report import Lost

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("src/**/README.md"),
        *ROOT.glob("tools/**/README.md"),
    )
)
ANCHOR = re.compile(r"\]\(((?![a-z]+:)[^)#]*)#([^)]+)\)")
NAMED = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|mjs|toml|yaml))`|\]\(((?![a-z]+:)[^)#]+)[^)]*\)")


FOLDERS = ("bench", "deploy", "docs", "src", "tests", "tools")


@pytest.fixture(scope="module")
def files():
    paths = [*ROOT.glob("*"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
    return ["/" + path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_a_page_names_exist(page, files):
    text = (ROOT / page).read_text(encoding="utf-8")
    for code, link in NAMED.findall(text):
        if code:
            assert any(name.endswith(f"/{code}") for name in files), code
        else:
            assert (ROOT / page.parent / link).exists(), link


def anchors(text):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_headings_that_a_page_points_to_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, anchor in ANCHOR.findall(text):
        there = ROOT / page.parent / name if name else ROOT / page
        assert anchor in anchors(there.read_text(encoding="utf-8")), (name, anchor)


METRIC = re.compile(r"`milepost:([a-z0-9_]+)")


def test_metrics_that_pages_name_exist():
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("src/**/*.py"))
    names = {n for page in PAGES for n in METRIC.findall((ROOT / page).read_text(encoding="utf-8"))}
    assert len(names) > 20
    known = set(re.findall(r'"(?:milepost:)?([a-z0-9_]+)"', text))
    endings = ("", "_total", "_seconds", "_seconds_total", "_info")
    exposed = {name + ending for name in known for ending in endings}
    assert names - exposed == set()


MAPPED = (
    *("disaggregation", "kernels", "layers", "runner", "scheduler", "server", "tiers"),
    *("engine", "engine/text", "engine/constraints", "engine/assembly", "engine/loop"),
    "engine/processes",
)


@pytest.mark.parametrize("package", MAPPED)
def test_a_package_says_what_each_of_its_modules_is_for(package):
    folder = ROOT / "src" / "milepost" / package
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    described = ast.get_docstring(ast.parse(text), clean=False)
    rows = [line for line in described.splitlines() if line.startswith("    ")]
    columns = [re.split(r" {3,}", line.strip())[-1] for line in rows]
    named = [name for column in columns for name in re.findall(r"\w+", column)]
    assert len(named) == len(set(named))
    assert modules <= set(named) <= modules | folders


INSTALLS = re.compile(r"pip install '?([\w.]+)\[([^\]]+)\]")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def refuse_index(sources):
    """Until a package index has it, it is installed from a checkout."""
    if "Nothing is released yet" in (ROOT / "CHANGELOG.md").read_text():
        assert set(sources) <= {"."}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_installs_can_be_had(page):
    found = INSTALLS.findall((ROOT / page).read_text(encoding="utf-8"))
    refuse_index(source for source, _ in found)
    assert EXTRAS.keys() >= {name for _, names in found for name in names.split(",")}


def test_what_errors_say_to_install_can_be_had():
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("src/**/*.py"))
    refuse_index(source for source, _ in INSTALLS.findall(text))
    extras = re.findall(r"""\b(?:missing|how_to_install)\([^)]*?['"](\w+)['"]\s*\)""", text)
    assert len(extras) > 5
    assert EXTRAS.keys() >= set(extras)


MEMBER = re.compile(r"`([A-Z][a-z]\w*)\.([a-z]\w+)")


def members():
    """Of every class: methods, fields, and what it sets on itself."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for own in ast.walk(node):
                    match own:
                        case (
                            ast.FunctionDef(name=name)
                            | ast.Name(id=name)
                            | ast.Attribute(attr=name)
                        ):
                            names.add(name)
    return found


def test_members_of_classes_that_pages_name_exist():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    named = set(MEMBER.findall(text))
    known = members()
    assert len(named) > 10
    assert {pair for pair in named if pair[1] not in known.get(pair[0], ())} == set()


def test_clients_are_of_the_versions_that_the_page_names():
    text = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    files = (ROOT / "constraints.txt", ROOT / "tests" / "clients" / "requirements.txt")
    pinned = {version for file in files for version in re.findall(r"==(.*)", file.read_text())}
    pinned |= set(re.findall(r"@([\d.]+)", (ROOT / "Makefile").read_text()))
    rows = re.findall(r"^\| [^|]+ \| (\d[\d.]+) \|", text, re.M)
    assert len(rows) == 16
    assert set(rows) <= pinned


SCRIPT = re.compile(r"python (-m )?((?:bench|tests|tools)[\w/.]*\w)")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_scripts_that_a_page_starts_can_be_started(page):
    """The benchmarks' as files: they import each other as such."""
    for is_module, name in SCRIPT.findall((ROOT / page).read_text(encoding="utf-8")):
        assert not (is_module and name.startswith("bench")), name
        path = ROOT / (f"{name.replace('.', '/')}.py" if is_module else name)
        is_any = "NAME" in name and path.parent.is_dir()
        assert is_any or path.is_file() or (path / "__main__.py").is_file(), name


def test_every_reason_for_lost_tokens_is_in_the_table():
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## What came from the cache\n(.*?)^#", text, re.S | re.M)
    named = re.findall(r"^\| (`.*?`) \|", section, re.M)
    assert {name for row in named for name in re.findall(r"`(\w+)`", row)} == set(Lost)
