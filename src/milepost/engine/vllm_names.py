"""vLLM's flags that differ from ours, for command lines of `vllm serve` (`cli.vllm_flags`) and for
the arguments of its `LLM`. The table is `vllm_flags.toml`; names are written as flags, without
leading dashes.

A flag may have another name here, or other words for its values. It is dropped if nothing here
needs it. It is refused, with what to do instead, if dropping it would change the answers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from milepost.config import EngineConfig
from milepost.errors import ConfigError

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A row of the table. A flag that is neither ours nor refused is dropped."""

    name: str = ""
    """Our name; empty if there is none."""
    has_value: bool = True
    words: Mapping[str, str] = field(default_factory=dict)
    """Maps vLLM's value to our word, which is empty for our default."""
    has_units: bool = False
    """Whether 32k and 32K are numbers."""
    instead: str = ""
    """How to get the same effect here, shown when the flag is refused."""
    without_effect: tuple[str, ...] = ()
    """Values that are accepted although the flag is refused, since they change nothing."""

    @property
    def is_dropped(self) -> bool:
        return not (self.name or self.instead)

    def translated(self, value: str) -> str:
        """Returns our word for a value."""
        return self.words.get(value, number(value) if self.has_units else value)


_TABLE = tomllib.loads(Path(__file__).with_name("vllm_flags.toml").read_text(encoding="utf-8"))
SHORT: Mapping[str, str] = {f"-{short}": f"--{name}" for short, name in _TABLE["short"].items()}
"""Short flags, with the long ones that they stand for."""
LISTS = frozenset(_TABLE["lists"]["options"].split())
"""Flags that take any number of values."""


def _read(table: Mapping[str, Any]) -> dict[str, ForeignFlag]:
    found = {given: ForeignFlag(name=name) for given, name in table["renamed"].items()}
    found |= {name: ForeignFlag(name=name, words=words) for name, words in table["words"].items()}
    for name in table["numbers"]["with_units"].split():
        found[name] = replace(found.get(name, ForeignFlag(name=name)), has_units=True)
    for row in (table["dropped"], *table["refused"]["rows"]):
        given = tuple(row.get("without_effect", "").split())
        flag = ForeignFlag(instead=row.get("instead", ""), without_effect=given)
        found |= dict.fromkeys(row.get("options", "").split(), flag)
        found |= dict.fromkeys(row.get("switches", "").split(), replace(flag, has_value=False))
    return found


FOREIGN: Mapping[str, ForeignFlag] = _read(_TABLE)
"""The table, by vLLM's names."""


def number(text: str) -> str:
    """Returns 32000 for `32k` and 32768 for `32K`."""
    match = _NUMBER.fullmatch(text)
    return str(int(float(match[1]) * _UNITS[match[2]])) if match else text


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of vLLM's `LLM` under our names, without those that have no effect. Raises
    ConfigError for unsupported arguments."""
    found: dict[str, Any] = {}
    for given, value in options.items():
        flag = FOREIGN.get(given.replace("_", "-"), ForeignFlag(name=given))
        if flag.is_dropped or (flag.instead and _has_no_effect(flag, value)):
            continue
        if flag.instead:
            instead = _FLAG.sub(_option, flag.instead)
            raise ConfigError(f"{given}={value!r} is not supported: {instead}")
        # A torch.dtype calls itself by its library's name, too.
        said = str(value).removeprefix("torch.")
        word = flag.words.get(said, said)
        if not word and said:
            continue
        if given == "dtype":
            value = word
        elif isinstance(value, str):
            value = flag.translated(value)
            value = int(value) if flag.has_units and value.isdecimal() else value
        found[flag.name.replace("-", "_")] = value
    return found


_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")


def _option(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_")


def _has_no_effect(flag: ForeignFlag, value: object) -> bool:
    """Returns whether a refused flag has a value that changes nothing."""
    if value is None or not flag.without_effect:
        return value is None or value is False
    return str(value).removesuffix(".0") in flag.without_effect


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that are no fields of `EngineConfig`."""
    of_engine = EngineConfig.__annotations__
    known = sorted(
        (field.name for field in fields(EngineConfig)), key=lambda name: name not in of_engine
    )
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
            raise ConfigError(f"option {name!r} is unknown: {hint}")
