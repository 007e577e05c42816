"""What the package says of itself: the index page's links, versions of Python, and sources."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]*\)|(?:src|srcset|href)=\"(?!https?://|#)[^\"]*\"")


@pytest.fixture(scope="module")
def described():
    """The README as a package index shows it."""
    return ProjectMetadata(str(ROOT), PluginManager()).core.readme


def test_the_index_page_has_no_relative_links(described):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(RELATIVE.findall(readme)) > 20
    assert RELATIVE.findall(described) == []
    assert described.splitlines()[0] == readme.splitlines()[0]


def test_links_of_the_index_page_lead_to_files_of_the_repository(described):
    address = PROJECT["urls"]["Repository"]
    found = re.findall(rf"{re.escape(address)}/(?:blob|raw)/main/([^)#\"]+)", described)
    assert len(found) > 20
    assert [name for name in found if not (ROOT / name).exists()] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", described)
    assert pictures
    assert all(url.startswith(f"{address}/raw/main/") for url in pictures)


def test_the_versions_of_python_are_those_that_the_documents_name():
    versions = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    assert "{}.{}".format(*sys.version_info) in versions
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"tests run with Python ([\d., and]+)\.", text)
    assert set(re.findall(r"3\.\d+", named)) == versions


def test_the_notice_names_every_source_of_the_embedded_model():
    card = (ROOT / "src" / "milepost" / "tiny" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \(\w+\) \| \S+ \| ([^|]+?) \|", card, re.M)
    assert len(rows) > 30
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert set(rows) == set(re.findall(r"^  ([\w.-]+) {2,}(.*)$", notice, re.M)[: len(rows)])
    for file in (ROOT / "tests" / "data").glob("*.gz"):
        assert file.name in notice
