"""Docstrings and comments avoid the forms that do not read as a sentence."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import milepost

ROOT = Path(milepost.__file__).parent

DONE = (
    *("cache", "cli", "engine", "layers", "load", "models", "parallel", "runner", "scheduler"),
    *("server", "speculative", "page", "ray", "images", "kernels"),
    *("disaggregation", "kv_events", "simulator", "tiers"),
    *("annexes.py", "checks.py", "config.py", "demo.py", "errors.py", "frames.py"),
    *("image_config.py", "pictures.py"),
    *("kv_config.py", "kv_transfer_params.py"),
    *("sampling_params.py", "speculative_config.py"),
)
"""Packages and modules whose sentences are checked. The list grows until it names them all."""

BAD_BEGINNING = re.compile(r"(Of|Which|What|By|With|The same)\b")
BAD_PHRASE = re.compile(r"\b(of which|so many|behind)\b", re.IGNORECASE)


def faults(text: str) -> Iterator[str]:
    """Yields what is wrong with a docstring."""
    text = " ".join(text.split())
    if begins := BAD_BEGINNING.match(text):
        yield f"begins with {begins[0]!r}"
    if len(re.findall(r"(?<!so )\bthat\b", re.split(r"[.:;](?: |$)", text)[0], re.IGNORECASE)) > 1:
        yield "has more than one 'that' in its first sentence"
    yield from faults_of_phrases(text)


def faults_of_phrases(text: str) -> Iterator[str]:
    """Yields what is wrong with any sentence."""
    for phrase in BAD_PHRASE.findall(text):
        yield f"says {phrase!r}"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields each docstring, those of fields and constants too, with its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields each comment with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("name", DONE)
def test_docstrings_and_comments_are_plain_sentences(name):
    path = ROOT / name
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    found = []
    for file in files:
        source = file.read_text(encoding="utf-8")
        both = ((docstrings, faults), (comments, faults_of_phrases))
        for read, judge in both:
            for line, text in read(source):
                found += [f"{file}:{line}: {fault}: {text}" for fault in judge(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Of a tensor with one entry for each of what is cut.",
        "Which drafts are accepted.",
        "What a page holds.",
        "By request number.",
        "With a guess that counts.",
        "The same of many rows.",
        "Returns the drafts that follow the token that was sampled.",
        "Returns the steps, of which the last is short.",
        "Returns so many pages.",
        "Returns the tokens behind the last.",
    ],
)
def test_a_bad_docstring_is_found(text):
    assert list(faults(text))


def test_a_plain_docstring_has_no_fault():
    assert not list(faults("Returns the drafts that were accepted. The rest, that is, is dropped."))


FILE = re.compile(r"(?<![\w/.])((?:\w+/)*\w+\.py)\b")
MODULE = re.compile(r"`((?:[a-z_]\w*\.)+\w+)`")
ELSEWHERE = {"v1/core/kv_cache_utils.py"}
"""Files of other projects that are named as sources."""


def is_in(place: Path, names: list[str]) -> bool:
    """Whether a folder has such a module, and the module the name that may stand last."""
    while names and (place / names[0]).is_dir():
        place, names = place / names[0], names[1:]
    module = place / f"{names[0]}.py" if names else place
    if module.is_file():
        names = names[1:]
    else:
        module = place / "__init__.py"
    text = module.read_text(encoding="utf-8") if module.is_file() else ""
    return bool(text) and all(re.search(rf"\b{name}\b", text) for name in names)


def stale(text: str, folder: Path) -> Iterator[str]:
    """Yields the files and modules that a docstring of this folder names although they are not
    there."""
    repository = ROOT.parents[1]
    for name in FILE.findall(text):
        is_there = name in ELSEWHERE or (repository / name).is_file()
        if not is_there and not any(True for _ in ROOT.glob(f"**/{name}")):
            yield name
    for name in MODULE.findall(text):
        first, *_ = names = name.split(".")
        places = [folder, *(p for p in folder.parents if p.is_relative_to(ROOT))]
        if (ROOT / first).is_dir() and not any(is_in(place, names) for place in places):
            yield name


def test_what_docstrings_name_is_there():
    found = [
        f"{file}:{line}: {name}"
        for file in sorted(ROOT.rglob("*.py"))
        for line, text in docstrings(file.read_text(encoding="utf-8"))
        for name in stale(text, file.parent)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["See `kernels.gone.Int4`.", "Needs a pool (one_pool.py)."])
def test_a_name_that_is_gone_is_found(text):
    assert list(stale(text, ROOT / "layers"))
