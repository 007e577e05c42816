"""`--config FILE`: flags of a command line in a YAML file, as `vllm serve` has them.

    model: ./checkpoint
    max-model-len: 32768
    served-model-name: [a, b]
    speculative-config: {method: mtp, num_speculative_tokens: 2}

The command line overrides the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from milepost.cli.vllm_flags import full_name
from milepost.errors import ConfigError

_FLAG = "--config"


def with_file(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the flags of the file that they name behind them. Raises ConfigError."""
    own, path, todo = list[str](), None, list(reversed(arguments))
    while todo:
        token = todo.pop()
        name, sign, value = token.partition("=")
        if name != _FLAG:
            own.append(token)
            continue
        if path is not None:
            raise ConfigError(f"{_FLAG} {path}: name one file")
        if not sign and not todo:
            raise ConfigError(f"{_FLAG}: a value is missing behind it")
        path = value if sign else todo.pop()
    if path is None:
        return own
    said = {_plain(token) for token in own if token.startswith("-")}
    if own and not own[0].startswith("-"):
        said.add("model")
    flags = _read(path)
    return own + [
        token for name in flags if _plain(name) not in said for token in _tokens(name, flags[name])
    ]


def _plain(token: str) -> str:
    """A flag's name, whichever way it is written, and whether it is switched on or off."""
    return full_name(token.partition("=")[0].partition(".")[0]).removeprefix("no-")


def _read(path: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{_FLAG} {path}: {why}") from error
    if found is None:
        return {}
    if not (isinstance(found, dict) and all(isinstance(name, str) for name in found)):
        raise ConfigError(f"{_FLAG} {path}: use names of flags and their values")
    found = {f"--{name.removeprefix('--')}": value for name, value in found.items()}
    if _FLAG in found:
        raise ConfigError(f"{_FLAG} {path}: a file cannot name another one")
    return found


def _tokens(name: str, value: Any) -> Iterable[str]:
    """A flag as it stands on a command line; a list is the flag several times."""
    if value is None:
        return []
    if value is True:
        return [name]
    if value is False:
        return [f"--no-{name[2:]}"]
    if isinstance(value, list):
        return [token for each in value for token in _tokens(name, each)]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return [f"{name}={text}"]
