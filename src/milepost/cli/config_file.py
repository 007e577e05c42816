"""`--config FILE` reads a command line's flags from a YAML file, in the format of `vllm serve`.

    model: ./checkpoint
    max-model-len: 32768
    served-model-name: [a, b]
    speculative-config: {method: mtp, num_speculative_tokens: 2}

The command line overrides the file. Values are taken as written: 1.10 stays 1.10.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml
from cyclopts import Parameter

from milepost.checks import MAX_DEPTH
from milepost.cli.vllm_flags import full_name
from milepost.errors import ConfigError
from milepost.small_files import read_small

_FLAG = "--config"
_NAMED = re.compile(r"--([\w-]+)|^(\w+): |\b(\w+)=")
"""Matches the flag, or the configuration field, that a message is about."""

ConfigFile = Annotated[
    Path | None,
    Parameter(help="YAML file with more of these flags; those given here come first."),
]
"""The `--config` flag, for commands to list: its file is read before they are called."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line, followed by the flags of the file that it names."""

    words: list[str]
    path: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Maps each flag that comes from the file to its line."""

    def placed(self, message: str) -> str:
        """Adds the file and line to a message about a flag from the file; returns others
        unchanged."""
        named = _NAMED.search(message)
        line = self.lines.get(_plain(named[named.lastindex or 0])) if named else None
        return message if line is None else f"{_FLAG} {self.path}, line {line}: {message}"


@dataclass(frozen=True, slots=True)
class _FileFlag:
    line: int
    words: list[str]


def with_file(arguments: Sequence[str]) -> Arguments:
    """Returns the arguments with the flags of the file that they name. Raises ConfigError."""
    given, path, todo = list[str](), None, list(reversed(arguments))
    while todo:
        token = todo.pop()
        name, sign, value = token.partition("=")
        if name != _FLAG:
            given.append(token)
            continue
        if path is not None:
            raise ConfigError(f"{_FLAG} {path}: name one file")
        if not sign and not todo:
            raise ConfigError(f"{_FLAG}: a value is missing after it")
        path = value if sign else todo.pop()
    if path is None:
        return Arguments(given)
    said = {_plain(token) for token in given if token.startswith("-")}
    if given and not given[0].startswith("-"):
        said.add("model")
    more = {name: entry for name, entry in _read(path).items() if name not in said}
    words = [word for entry in more.values() for word in entry.words]
    return Arguments(given + words, path, {name: entry.line for name, entry in more.items()})


def _plain(token: str) -> str:
    """Returns a flag's full name without dashes, for any spelling, switched on or off."""
    return full_name(token.partition("=")[0].partition(".")[0]).removeprefix("no-")


def _read(path: str) -> Mapping[str, _FileFlag]:
    """Reads the flags of a file, by name."""
    try:
        text = read_small(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG} {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        _check_nesting(path, text)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            _check_names(path, root)
            loader.flatten_mapping(root)
    except yaml.MarkedYAMLError as error:
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise _problem(path, error.problem_mark, what) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{_FLAG} {path}: {' '.join(str(error).split())}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _problem(path, root.start_mark, "use names of flags and their values")
    flags = {}
    for key, value in root.value:
        try:
            words = list(_words(loader, f"--{key.value.removeprefix('--')}", value))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            what = "use a text, a number, a list of them or an object as JSON has them"
            raise _problem(path, value.start_mark, f"{key.value}: {what}") from error
        flags[_plain(key.value)] = _FileFlag(key.start_mark.line + 1, words)
    return flags


def _check_nesting(path: str, text: str) -> None:
    """Raises ConfigError for nesting too deep for the stack, and for aliases that multiply."""
    are_anchors, num_aliases = [], 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            are_anchors.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            are_anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            num_aliases += 1
            if any(are_anchors):
                raise _problem(path, event.start_mark, "an alias inside an anchor")
        if len(are_anchors) > MAX_DEPTH or num_aliases > MAX_DEPTH:
            what = f"use {MAX_DEPTH} levels and {MAX_DEPTH} aliases at most"
            raise _problem(path, event.start_mark, what)


def _check_names(path: str, root: yaml.MappingNode) -> None:
    names = set()
    for key, _ in root.value:
        if not key.tag.endswith((":str", ":merge")) or not key.value:
            raise _problem(path, key.start_mark, "use names of flags and their values")
        name = _plain(key.value)
        if name == _FLAG[2:]:
            raise _problem(path, key.start_mark, "a file cannot name another one")
        if name in names:
            raise _problem(path, key.start_mark, f"{key.value} appears twice")
        names.add(name)


def _problem(path: str, mark: yaml.Mark | None, what: str) -> ConfigError:
    where = "" if mark is None else f", line {mark.line + 1}"
    return ConfigError(f"{_FLAG} {path}{where}: {what}")


def _words(loader: yaml.SafeLoader, name: str, value: yaml.Node) -> Iterator[str]:
    """Yields a flag's words as on a command line; a list repeats the flag. Raises TypeError,
    ValueError or YAMLError for a value that no flag can have."""
    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        kind = node.tag.rpartition(":")[2]
        if kind == "bool":
            is_on = loader.construct_yaml_bool(node)
            yield name if is_on else f"--no-{name[2:]}"
        elif isinstance(node, yaml.MappingNode):
            yield f"{name}={json.dumps(loader.construct_object(node, deep=True))}"
        elif not isinstance(node, yaml.ScalarNode):
            raise TypeError("a list in a list")
        elif kind != "null":
            yield f"{name}={node.value}"
