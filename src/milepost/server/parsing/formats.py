"""The formats by name, and what a format of tool calls has."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol, TypeVar

from milepost.server.parsing import families, lark
from milepost.server.parsing.calls import CallReader
from milepost.server.parsing.reasoning import ThinkTags


class ToolCalls(Protocol):
    """A way to write tool calls."""

    open: str
    close: str
    signs: Sequence[str]

    def reader(self, tools: lark.Tools) -> CallReader: ...

    def grammar(self, tools: lark.Tools, tag: lark.Tag, *, is_single: bool) -> Sequence[str]:
        """Rules of which `calls` is one call of these tools, or several."""


class _Signed(Protocol):
    @property
    def signs(self) -> Sequence[str]: ...


S = TypeVar("S", bound=_Signed)


def _gathered(kind: str) -> dict[str, object]:
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [import_module(f"{families.__name__}.{name}") for name in names]
    return {name: its for module in modules for name, its in getattr(module, kind, {}).items()}


TOOL_CALLS: Mapping[str, ToolCalls] = _gathered("TOOL_CALLS")
REASONING: Mapping[str, ThinkTags] = _gathered("REASONING")
CALLS_OF: Mapping[str, str] = _gathered("CALLS_OF")
"""`model_type` -> what its models write, where their templates don't show it."""


def told_by(template: str, formats: Mapping[str, S]) -> str:
    """The format that a chat template writes itself: all its signs are there, and more than those
    of others. "none" if there is no such format; one without signs has to be named."""
    signed = [
        name
        for name, its in formats.items()
        if its.signs and all(sign in template for sign in its.signs)
    ]
    return max(signed, key=lambda name: len("".join(formats[name].signs)), default="none")
