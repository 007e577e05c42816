"""Knows which model types the files of `architectures` declare, without importing them: a model
that is not supported is refused before torch is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from milepost.errors import UnsupportedModelError
from milepost.models import architectures


def declared_types() -> tuple[str, ...]:
    """Returns the values of `model_types=(...)` in these files, in the order of the registry."""
    types: list[str] = []
    for path in (file for folder in architectures.__path__ for file in _files(folder)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        in_file = [
            (node.value.lineno, ast.literal_eval(node.value))
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword)
            and node.arg == "model_types"
            and isinstance(node.value, ast.Tuple)
        ]
        types += [name for _, names in sorted(in_file) for name in names]
    return tuple(types)


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("[!_]*.py"))


def unknown_type(model_type: object, known: Iterable[str]) -> UnsupportedModelError:
    """Returns the error for a model type that is not among those known."""
    return UnsupportedModelError(
        f"model_type={model_type!r} is not supported; supported are {', '.join(known)}"
    )
