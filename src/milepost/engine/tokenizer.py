"""Loads the tokenizer of a checkpoint.

Knows folders in Hugging Face format and hub ids; does not know models.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def without_torch() -> None:
    """For a process that only tokenizes, before it imports transformers: that imports torch with
    its tokenizers, two seconds' work, unless it finds none. Nothing can import it from then on.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.getLogger("transformers").addFilter(
        lambda record: not str(record.msg).startswith("PyTorch was not found")
    )


def load_tokenizer(
    source: str | Path,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder, or of a hub id, kept as `find_folder` keeps checkpoints.

    Raises ConfigError, naming the source, if there is none or it cannot be read.
    """
    folder = Path(source)
    if folder.exists():
        _check_folder(folder)
    elif folder.is_absolute() or str(source).startswith("."):
        raise _no_tokenizer(source, "there is no such folder")
    from transformers import AutoTokenizer  # the import takes seconds; token-id engines skip it

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source), revision=revision, cache_dir=download_dir, token=token
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _no_tokenizer(source, _first_line(error)) from error
    # It would foretell "indexing errors" of prompts that the engine takes, or refuses by itself.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


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
