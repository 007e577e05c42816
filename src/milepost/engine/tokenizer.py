"""Loads the tokenizer of a checkpoint, and the token ids that end an answer.

Knows folders in Hugging Face format and hub ids; does not know models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(source: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder, or of a hub id.

    Raises ConfigError, naming the source, if there is none or it cannot be read.
    """
    folder = Path(source)
    if folder.exists():
        _check_folder(folder)
    elif folder.is_absolute() or str(source).startswith("."):
        raise _no_tokenizer(source, "there is no such folder")
    from transformers import AutoTokenizer  # the import takes seconds; token-id engines skip it

    try:
        return AutoTokenizer.from_pretrained(str(source), revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _no_tokenizer(source, _first_line(error)) from error


def end_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The ids that end an answer, sorted: those of generation_config.json and the tokenizer's own.

    A checkpoint without generation_config.json is asked through config.json. Raises ConfigError for
    a file that is no JSON object.
    """
    ids = _listed_ids(_read(folder / "generation_config.json"))
    if not ids:
        config = _read(folder / "config.json")
        ids = _listed_ids(config) or _listed_ids(config.get("text_config") or {})
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = {*ids, tokenizer.eos_token_id}
    return tuple(sorted(ids))


def _check_folder(folder: Path) -> None:
    """Without a vocabulary file, transformers would make up an empty tokenizer."""
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise _no_tokenizer(folder, f"the folder has none of {', '.join(_VOCABULARIES)}")


def _no_tokenizer(source: str | Path, why: str) -> ConfigError:
    return ConfigError(
        f"no tokenizer in {str(source)!r}: {why}. Name one with tokenizer=..., or use "
        "skip_tokenizer_init=True and give prompts as token ids"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: it should be a JSON object")
    return content


def _listed_ids(config: dict[str, Any]) -> set[int]:
    ids = config.get("eos_token_id")
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}
