"""The annexes: parts that the core runs without. No module of the core imports one; whoever needs
one asks for it here, by name, at the moment of need. The core never asks for `milepost.ray`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from milepost.errors import ConfigError, needing


@dataclass(frozen=True, slots=True, kw_only=True)
class Annex:
    """How to reach an annex."""

    folder: str
    """The annex: it is installed if `milepost` has this folder."""
    module: str
    """The module of `milepost` that is imported."""
    extra: str
    """The extra that brings its libraries."""


ANNEXES: Final = {
    "exchange": Annex(
        folder="disaggregation", module="disaggregation.exchange", extra="disaggregation"
    ),
    "events": Annex(folder="kv_events", module="kv_events", extra="server"),
    "page": Annex(folder="page", module="page.routes", extra="server"),
    "watch": Annex(folder="page", module="page.watch", extra="server"),
    "simulate": Annex(folder="simulator", module="cli.simulate", extra="server"),
    "bench": Annex(folder="load", module="cli.bench", extra="server"),
}
"""Annexes by the names under which the core asks for them."""


def is_installed(name: str) -> bool:
    """Returns whether an annex's folder is there."""
    spec = find_spec(f"milepost.{ANNEXES[name].folder}")
    return spec is not None and spec.origin is not None  # None if only bytecode is left


def annex(name: str, *, wanted_by: str) -> Any:
    """Returns an annex's module. Raises ConfigError if the annex or one of its libraries is not
    installed; the error names `wanted_by`.
    """
    known = ANNEXES[name]
    if not is_installed(name):
        raise ConfigError(
            f"{wanted_by} needs the annex milepost.{known.folder}, which is not installed here: "
            "install all of milepost, or leave it out"
        )
    with needing(wanted_by, known.extra):
        return import_module(f"milepost.{known.module}")
