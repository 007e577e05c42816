"""Translates command lines of `vllm serve`, as people have them in scripts, to `milepost serve`.

The table in `engine.vllm_names` has vLLM's names; this module applies it to a command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from milepost.config import EngineConfig
from milepost.engine.vllm_names import FOREIGN, LISTS, SHORT, ForeignFlag
from milepost.errors import ConfigError
from milepost.server.config import ServerConfig

_LEVEL = re.compile(r"-O\d")

_INVARIANT = "VLLM_BATCH_INVARIANT"
_ENGINES = (["serve"], ["run-batch"], ["generate"], ["chat"])
"""Commands that open an engine with flags of its own."""

_SWITCHES = frozenset(
    field.name.replace("_", "-")
    for config in (ServerConfig, EngineConfig)
    for field in fields(config)
    if field.default is False
)
"""Our flags that are off by default, so that their `--no-` form has no effect."""

_SINGLE = {
    field.name.replace("_", "-"): 1 if str(field.type).startswith("bool") else 2
    for config in (ServerConfig, EngineConfig)
    for field in fields(config)
    if not str(field.type).startswith("Sequence")
}
"""Our flags that take one value, and the number of words they take."""


def translated(arguments: Sequence[str]) -> list[str]:
    """Translates a command line to our flags. If a flag is repeated, the last one counts, as in
    argparse. Raises ConfigError for flags that are not supported."""
    words: list[str] = []
    objects: dict[str, dict[str, str]] = {}
    todo = list(reversed(arguments))
    names_model = any(token.partition("=")[0] == "--model" for token in arguments)
    while todo:
        token = todo.pop()
        name, sign, value = _split(token)
        if not name:
            words.append(token)
            continue
        if sign:
            todo.append(value)
        whole, _, key = name.partition(".")
        name = whole = whole.replace("_", "-")
        if key and _flag(whole).is_dropped and _flag(whole).has_value:
            _value(todo, name)
        elif key:  # --speculative-config.method mtp
            objects.setdefault(whole, {})[key] = _value(todo, name)
        else:
            has_model = names_model or (bool(words) and not words[0].startswith("-"))
            words += _one(name, todo, has_model=has_model)
    words = _last_of_each(words)
    for name, parts in objects.items():
        words += [f"--{name}", json.dumps(_nested(name, parts))]
    return words


def _last_of_each(tokens: Sequence[str]) -> list[str]:
    flags: list[tuple[str, Sequence[str]]] = []
    while tokens:
        is_flag = tokens[0].startswith("-")
        name = full_name(tokens[0]).removeprefix("no-") if is_flag else ""
        num_words = _SINGLE.get(name, 1)
        flags.append((name if name in _SINGLE else "", tokens[:num_words]))
        tokens = tokens[num_words:]
    last = {name: place for place, (name, _) in enumerate(flags)}
    return [
        word
        for place, (name, words) in enumerate(flags)
        if not name or last[name] == place
        for word in words
    ]


def _nested(name: str, parts: Mapping[str, str]) -> dict[str, Any]:
    """Builds the object that dotted keys such as `a.b` describe, for the flag `name`."""
    built: dict[str, Any] = {}
    for path, part in parts.items():
        *outer, key = path.split(".")
        place = built
        for step in outer:
            inner = place.setdefault(step, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--{name}.{path} {part}: {step} is {inner}, not an object")
            place = inner
        if isinstance(place.get(key), dict):
            raise ConfigError(f"--{name}.{path} {part}: {key} is an object already")
        place[key] = _json(part)
    return built


def _split(token: str) -> tuple[str, str, str]:
    """Splits a token into its name without dashes, `=` if there is one, and the value after it. The
    name is empty if the token is not a flag."""
    if _LEVEL.fullmatch(token):
        return "optimization-level", "=", token[2:]
    name, sign, value = token.partition("=")
    short, dot, key = name.partition(".")
    name = SHORT.get(short, short) + dot + key
    if not name.startswith("--") or len(name) == 2:
        return "", "", ""
    return name[2:], sign, value


def _one(name: str, todo: list[str], *, has_model: bool) -> list[str]:
    """Translates one flag. Its values are taken from `todo`, whose end comes next."""
    positive, flag = name.removeprefix("no-"), _flag(name)
    switch = _flag(positive)
    is_dropped = switch.is_dropped and not switch.has_value
    if is_dropped or (positive != name and positive in _SWITCHES):
        return []
    if not flag.name:
        given = _values(todo, name) if flag.has_value else []
        # A plugin is named by its path.
        has_effect = not given or given[0].rpartition("/")[2] not in flag.without_effect
        if flag.instead and has_effect:
            raise ConfigError(f"{' '.join([f'--{name}', *given])} is not supported: {flag.instead}")
        return []
    if name in ("served-model-name", "api-key", "allowed-media-domains") and has_model:
        return [part for value in _values(todo, name) for part in (f"--{name}", value)]
    if name == "hf-token" and (not todo or todo[-1].startswith("-")):
        return []  # the token saved by `hf auth login` is used
    if flag.words or flag.has_units:
        word = flag.translated(_value(todo, name))
        return [f"--{name}", word] if word else []
    return [f"--{flag.name}"]


def _flag(name: str) -> ForeignFlag:
    return FOREIGN.get(name, ForeignFlag(name=name))


def _value(todo: list[str], name: str) -> str:
    if not todo:
        raise ConfigError(f"--{name}: a value is missing after it")
    return todo.pop()


def _values(todo: list[str], name: str) -> list[str]:
    """Takes one value; for a flag with a list, all values up to the next flag."""
    values = [_value(todo, name)]
    while name in LISTS and todo and not todo[-1].startswith("-"):
        values.append(todo.pop())
    return values


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def full_name(flag: str) -> str:
    """Returns a flag's full name in our spelling, without leading dashes."""
    name = SHORT.get(flag, flag).lstrip("-").replace("_", "-")
    return _flag(name).name or name


def with_environment(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Adds `--batch-invariant` to the command line of an engine if vLLM's variable for it is set.
    Raises ConfigError for a value that is neither 0 nor 1."""
    value = environment.get(_INVARIANT, "0") or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{_INVARIANT}={value}: use 0 or 1")
    is_given = any(word.partition("=")[0] == "--batch-invariant" for word in words)
    if value == "0" or is_given or list(words[:1]) not in _ENGINES:
        return list(words)
    return [words[0], "--batch-invariant", *words[1:]]


def known() -> Iterable[str]:
    """Returns all flags that are dropped, renamed or refused here."""
    return (name for name, flag in FOREIGN.items() if flag.name != name)
