"""Where the training text comes from: packages with their licences, fetched by their ordinary
clients.

Owns the list of sources and turns each into documents (id, text). A source is here only if its
licence allows redistributing what was trained on it; documentation under share-alike or
invariant-section licences (celery, pandas, GNU manuals) is left out.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    package: str
    licence: str
    form: str  # rst, html or man inside a Debian package; docstrings of an installed Python package
    version: str = ""


PYTHON_DOC = "python3.11-doc"
DEBIAN = [
    Source(package=PYTHON_DOC, licence="PSF-2.0 (code examples also 0BSD)", form="rst"),
    Source(package="python-django-doc", licence="BSD-3-Clause", form="html"),
    Source(package="postgresql-doc-15", licence="PostgreSQL", form="html"),
    Source(package="sqlite3-doc", licence="public domain", form="html"),
    Source(package="libssl-doc", licence="Apache-2.0", form="man"),
    Source(package="libcurl4-doc", licence="curl", form="man"),
    Source(package="tcl8.6-doc", licence="TCL (BSD-like)", form="man"),
    *(
        Source(package=package, licence=licence, form="rst")
        for package, licence in (
            ("cmake-doc", "BSD-3-Clause"),
            ("cython-doc", "Apache-2.0"),
            ("nova-doc", "Apache-2.0"),
            ("swift-doc", "Apache-2.0"),
            ("python-aiohttp-doc", "Apache-2.0"),
            ("python-attr-doc", "MIT"),
            ("python-click-doc", "BSD-3-Clause"),
            ("python-cryptography-doc", "Apache-2.0 or BSD-3-Clause"),
            ("python-dask-doc", "BSD-3-Clause"),
            ("python-flask-doc", "BSD-3-Clause"),
            ("python-ipython-doc", "BSD-3-Clause"),
            ("python-jinja2-doc", "BSD-3-Clause"),
            ("python-mpmath-doc", "BSD-3-Clause"),
            ("python-peewee-doc", "MIT"),
            ("python-pygments-doc", "BSD-2-Clause"),
            ("python-pytest-doc", "MIT"),
            ("python-requests-doc", "Apache-2.0"),
            ("python-setuptools-doc", "MIT"),
            ("python-tornado-doc", "Apache-2.0"),
            ("python-traitlets-doc", "BSD-3-Clause"),
            ("python-werkzeug-doc", "BSD-3-Clause"),
            ("python-xarray-doc", "Apache-2.0"),
            ("sphinx-doc", "BSD-2-Clause"),
            ("twisted-doc", "MIT"),
        )
    ),
]
INSTALLED = [
    Source(package="numpy", licence="BSD-3-Clause", form="docstrings"),
    Source(package="networkx", licence="BSD-3-Clause", form="docstrings"),
    Source(package="sympy", licence="BSD-3-Clause", form="docstrings"),
    Source(package="torch", licence="BSD-3-Clause", form="docstrings"),
]


def fetch(source: Source, folder: Path) -> tuple[Path, str]:
    """Downloads and unpacks a Debian package once; returns its folder and its version."""
    target = folder / source.package
    if not target.exists():
        subprocess.run(["apt-get", "download", "-q=2", source.package], cwd=folder, check=True)
        (archive,) = folder.glob(f"{source.package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, target], check=True)
    (archive,) = folder.glob(f"{source.package}_*.deb")
    return target, archive.name.split("_")[1].replace("%3a", ":")


def pages(source: Source, folder: Path) -> Iterator[tuple[str, Path]]:
    """The (document id, file) pairs of an unpacked Debian package, in order."""
    patterns = {
        "rst": ("_sources/", (".txt", ".rst")),
        "html": ("/html/" if source.package != "sqlite3-doc" else "/sqlite3/", (".html",)),
        "man": ("/man/", (".gz",)),
    }
    marker, endings = patterns[source.form]
    for path in sorted(folder.rglob("*")):
        name = path.as_posix()
        if (
            marker not in name
            or not name.endswith(endings)
            or not path.is_file()
            or path.is_symlink()
        ):
            continue
        if re.search(r"genindex|py-modindex|/search\.|/_modules/|locale/|translations", name):
            continue
        yield f"{source.package}/{name.split(marker, 1)[1]}", path


def page_text(source: Source, path: Path) -> str:
    if source.form == "man":
        return markup.man_text(path)
    raw = path.read_text(encoding="utf-8", errors="replace")
    return markup.html_text(raw) if source.form == "html" else markup.render(markup.rst_nodes(raw))


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """One document a module: the docstrings of an installed package, read without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.origin is not None, package
    root = Path(spec.origin).parent
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root.parent)
        if re.search(r"(^|/)(tests?|testing|_vendor|benchmarks)(/|$)", relative.as_posix()):
            continue
        text = _module_text(path, ".".join(relative.with_suffix("").parts))
        if text:
            yield f"{package}/{relative.as_posix()}", text


def stdlib_docstrings() -> Iterator[tuple[str, str]]:
    """One document a public module of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("test", "idlelib", "lib2to3", "antigravity", "this"):
            continue
        path = root / f"{name}.py"
        paths = [path] if path.exists() else sorted((root / name).rglob("*.py"))
        for path in paths:
            text = _module_text(path, ".".join(path.relative_to(root).with_suffix("").parts))
            if text and "/test" not in path.as_posix():
                yield f"stdlib/{path.relative_to(root).as_posix()}", text
    yield "stdlib/builtins", _builtins_text()


def _builtins_text() -> str:
    import builtins

    parts = []
    for name in sorted(vars(builtins)):
        value = getattr(builtins, name)
        if name.startswith("_") or not inspect.getdoc(value):
            continue
        parts.append(f"### `{name}`\n\n{inspect.getdoc(value)}")
    return "\n\n".join(parts)


def _module_text(path: Path, module: str) -> str:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    parts = []
    doc = ast.get_docstring(tree)
    if doc:
        parts.append(f"# Module `{module}`\n\n{doc.strip()}")
    stack: list[tuple[str, ast.stmt]] = [("", node) for node in reversed(tree.body)]
    while stack:
        prefix, node = stack.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}{node.name}"
        doc = ast.get_docstring(node)
        if doc and (not node.name.startswith("_") or node.name == "__init__"):
            arguments = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            parts.append(f"### `{name}{arguments}`\n\n{doc.strip()}")
        if isinstance(node, ast.ClassDef):
            stack.extend((f"{name}.", child) for child in reversed(node.body))
    return "\n\n".join(parts)


def installed_version(package: str) -> str:
    return importlib.metadata.version(package)


def fraction(identifier: str) -> float:
    """A number in [0, 1) that depends on the document's id alone; decides what is held out."""
    digest = hashlib.blake2b(identifier.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
