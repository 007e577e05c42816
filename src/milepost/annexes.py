"""The annexes: parts that the core runs without. No module of the core imports one; whoever needs
one asks for it here, by name, when it is needed.

    disaggregation    exchanges KV and states with other engines
    kv_events         tells routers what is cached
    page              the page at `/`
    simulator         `milepost simulate`
    load              `milepost bench`
    ray               replicas on Ray Serve; nothing asks for it
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from milepost.errors import ConfigError, missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Annex:
    """How to reach an annex."""

    module: str
    """The module of milepost that is imported."""
    extra: str
    """The extra that brings its libraries."""


ANNEXES: Final = {
    "disaggregation": Annex(module="disaggregation.access", extra="disaggregation"),
    "kv_events": Annex(module="kv_events", extra="server"),
    "page": Annex(module="page", extra="server"),
    "simulator": Annex(module="cli.simulate", extra="server"),
    "load": Annex(module="cli.bench", extra="server"),
}


def is_installed(name: str) -> bool:
    """Returns whether an annex's folder is there."""
    return find_spec(f"milepost.{name}") is not None


def annex(name: str, *, wanted_by: str) -> Any:
    """Returns an annex's module. Raises ConfigError, with what needs it, if the annex or one of its
    libraries is not installed.
    """
    if not is_installed(name):
        raise ConfigError(
            f"{wanted_by} needs the annex milepost.{name}, which is not installed here: install "
            "all of milepost, or leave it out"
        )
    known = ANNEXES[name]
    try:
        return import_module(f"milepost.{known.module}")
    except ModuleNotFoundError as error:
        raise missing(wanted_by, error.name, known.extra) from error
