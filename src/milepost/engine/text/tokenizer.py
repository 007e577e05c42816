"""Loads the tokenizer of a checkpoint.

Knows folders in Hugging Face format and hub ids; does not know models.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.models.folder import EMBEDDED_MODEL, find_folder, read_object, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_CONFIG = "config.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MAX_IDS = 2**24
_SAMPLE = "Tokens of a text."
"""A text to try a tokenizer with: some broken vocabularies fail only when they are used."""


def without_torch() -> None:
    """Hides torch from this process, which only tokenizes. transformers imports torch along with
    its tokenizers if it finds it, which takes two seconds. Call this before transformers is
    imported. Nothing can import torch afterwards."""
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.getLogger("transformers").addFilter(
        lambda record: not str(record.msg).startswith("PyTorch was not found")
    )


def tokenizer_for(config: EngineConfig) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of an engine, without the checkpoint's weights; None with
    skip_tokenizer_init. Raises ConfigError."""
    if config.skip_tokenizer_init:
        return None
    download_dir, token = config.download_dir, config.hf_token
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer, config.revision, download_dir, token)
    folder = find_folder(
        config.model or str(EMBEDDED_MODEL),
        revision=config.revision,
        with_weights=False,
        download_dir=download_dir,
        token=token,
    )
    return load_tokenizer(folder, config.revision)


def load_tokenizer(
    source: str | Path,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a local folder or a hub id, which is kept as `find_folder` keeps
    checkpoints. Raises ConfigError, naming the source, if there is none or it cannot be read."""
    folder = Path(source)
    if not folder.exists() and (folder.is_absolute() or str(source).startswith(".")):
        raise _no_tokenizer(source, "there is no such folder")
    try:
        with reading(source):
            if folder.exists():
                _check_folder(folder)
            tokenizer = _load(
                str(source), folder, revision=revision, cache_dir=download_dir, token=token
            )
            _check(tokenizer)
    except ConfigError as error:
        raise _no_tokenizer(source, str(error)) from error
    # It would foretell "indexing errors" of prompts that the engine takes, or refuses by itself.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _load(source: str, folder: Path, **options: str | None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. Code in the checkpoint is never run, and transformers does not ask for
    it."""
    # The import takes seconds; engines that are given token ids skip it.
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    known: dict[str, Any] = {}
    if (folder / _CONFIG).exists():
        # transformers would read all of it, which may be made to take for ever, to find its type.
        settings = read_object(folder / _CONFIG)
        model_type = str(settings.get("model_type"))
        is_known = model_type in CONFIG_MAPPING
        config = CONFIG_MAPPING[model_type]() if is_known else PreTrainedConfig()
        config.name_or_path = source
        if isinstance(settings.get("tokenizer_class"), str):
            config.tokenizer_class = settings["tokenizer_class"]
        known["config"] = config
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **known, **options)


def _check_folder(folder: Path) -> None:
    """Checks for a vocabulary file: without one transformers would return an empty tokenizer."""
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise ConfigError(f"the folder has none of {', '.join(_VOCABULARIES)}")
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path}: is no regular file")
    for name in _SETTINGS:
        if (folder / name).exists():
            read_object(folder / name)


def _check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a tokenizer that would fail with the first request. Disables
    truncation and padding, which a vocabulary's file may ask for."""
    template = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else [template]
    for each in templates:
        if not isinstance(each, str | None):
            raise ConfigError(f"chat_template is {type(each).__name__}: it should be text")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= _MAX_IDS:
        raise ConfigError(f"a token has id {largest}: no vocabulary has {_MAX_IDS} tokens")
    try:
        ids = tokenizer.encode(_SAMPLE)
    except Exception:  # noqa: BLE001  a vocabulary of words need not know these
        ids = tokenizer.encode(tokenizer.decode([min(tokenizer.get_vocab().values(), default=0)]))
    tokenizer.decode(ids)


def _no_tokenizer(source: str | Path, why: str) -> ConfigError:
    return ConfigError(
        f"no tokenizer in {str(source)!r}: {why}. Name one with tokenizer=..., or use "
        "skip_tokenizer_init=True and give prompts as token ids"
    )
