"""Libraries of others are those of their packages, byte for byte, with their licences."""

import hashlib
import tomllib
from pathlib import Path

import pytest

from milepost.page import routes

ROOT = Path(__file__).parents[2]
FOLDER = Path(routes.__file__).parent / "static" / "vendor"
LIBRARIES = tomllib.loads((FOLDER / "vendored.toml").read_text())
PERMISSIVE = {"MIT", "Apache-2.0", "BSD-3-Clause"}


def sha256(name):
    return hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_the_one_that_is_named(name):
    library = LIBRARIES[name]
    assert sha256(library["file"]) == library["sha256"]
    assert sha256(library["licence_file"]) == library["licence_sha256"]
    assert library["file"] == f"{name}-{library['version']}.mjs"
    assert library["version"] in (FOLDER / library["file"]).read_text()
    assert library["licence"] in PERMISSIVE
    assert f"{library['package']} {library['version']}" in (ROOT / "NOTICE").read_text()


def test_every_file_belongs_to_a_library():
    named = {library[key] for library in LIBRARIES.values() for key in ("file", "licence_file")}
    assert {path.name for path in FOLDER.iterdir()} == {*named, "vendored.toml"}
