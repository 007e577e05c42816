"""Code that readers of quantised checkpoints' configurations share: forms with their targets, and
checks that name the setting they refuse.

Settings that define how values are read are known one by one. Others, which a newer writer may have
added, are refused unless their value is empty: an unread setting could change every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from milepost.errors import UnsupportedModelError
from milepost.layers.quantised import Fp4Precision, Fp8Precision, Int4Precision, Int8Precision

Rule = Callable[[str], bool]
LowPrecision = Fp4Precision | Fp8Precision | Int4Precision | Int8Precision

_MATCH_S = 1.0
"""Time limit for one expression and one path: thousands of times what a real one takes."""
NOTHING: tuple[object, ...] = (None, False, "", 0, [], {})
"""Values that mean a setting is unused."""


@dataclass(frozen=True, slots=True)
class Group:
    """A form of low precision, and a rule that says which projections have it."""

    form: LowPrecision
    targets: Rule = field(default=lambda _: True)


RuleSet = tuple[tuple[Group, ...], Rule]
"""Groups, and the rule for projections that are left in the model's dtype."""


def want(settings: Mapping[str, Any], name: str, *wanted: Any, default: Any = None) -> None:
    """Refuses all values of a setting but those wanted."""
    value = settings.get(name, default)
    if value not in wanted:
        supported = " and ".join(map(repr, wanted))
        raise UnsupportedModelError(
            f"quantization_config: {name}={value!r} is not supported; supported is {supported}"
        )


def want_nothing(settings: Mapping[str, Any], *names: str, where: str) -> None:
    """Refuses these settings if their values mean anything."""
    for name in names:
        if settings.get(name) not in NOTHING:
            raise UnsupportedModelError(f"{where}: {name}={settings[name]!r} is not supported")


def want_known(settings: Mapping[str, Any], known: Container[str], *, where: str) -> None:
    """Refuses settings that nothing here reads, if their values mean anything."""
    want_nothing(settings, *(name for name in settings if name not in known), where=where)


def group_size_of(settings: Mapping[str, Any], default: int | None, *, where: str) -> int:
    """Returns the number of inputs in a group; -1 for all of a projection's."""
    size = settings.get("group_size", default)
    size = -1 if size is None else size
    if size not in (-1, 32, 64, 128):
        raise UnsupportedModelError(
            f"{where}: group_size={size!r} is not supported; supported are 32, 64, 128 and -1"
        )
    return int(size)


def any_of(patterns: Iterable[str] | None, what: str) -> Rule:
    """Returns a rule: whether a path is, or is below, one of these modules, or matches `re:`
    patterns. `what` is the setting's name."""
    rules = [_matcher(each, what) for each in patterns or ()]
    return lambda path: any(rule(path) for rule in rules)


@dataclass(frozen=True, slots=True)
class Expression:
    """A checkpoint's regular expression, which may be crafted to match forever."""

    pattern: regex.Pattern[str]
    what: str

    def match(self, path: str) -> bool:
        """Whether the expression matches the path's beginning. Raises UnsupportedModelError if that
        takes too long to tell."""
        try:
            return self.pattern.match(path, timeout=_MATCH_S) is not None
        except TimeoutError:
            raise UnsupportedModelError(
                f"quantization_config: {self.what} has {self.pattern.pattern!r}, which takes more "
                f"than {_MATCH_S:g} s to match {path!r}"
            ) from None


def expression(pattern: str, what: str) -> Expression:
    """Compiles an expression; refuses text that is no regular expression."""
    try:
        return Expression(regex.compile(pattern), what)
    except regex.error as error:
        raise UnsupportedModelError(
            f"quantization_config: {what} has {pattern!r}, which is no regular expression: {error}"
        ) from error


def below(modules: Iterable[str]) -> Rule:
    """Returns a rule: whether a path is, or is below, one of these modules. There may be
    thousands."""
    known = frozenset(modules)
    return lambda path: any(path[:end] in known for end in _ends(path))


def _ends(path: str) -> list[int]:
    return [len(path), *(end for end, letter in enumerate(path) if letter == ".")]


def _matcher(pattern: str, what: str) -> Rule:
    if pattern.startswith("re:"):
        compiled = expression(pattern[3:], what)
        return compiled.match
    return lambda path: f".{pattern}." in f".{path}."
