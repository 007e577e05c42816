"""Reads a checkpoint's generation_config.json: which tokens end an answer, and the recommended
sampling.

Knows folders in Hugging Face format; does not know models.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.config import GenerationConfig
from milepost.errors import ConfigError, InvalidRequestError
from milepost.logs import shown
from milepost.models.folder import read_object, reading
from milepost.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FILE = "generation_config.json"

_MAX_IDS = 2**24
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that have the same name in SamplingParams."""


def end_token_ids(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Returns the ids that end an answer, sorted: those of generation_config.json and the
    tokenizer's own. Without generation_config.json, config.json is read. `overrides` of config.json
    come before both files. A token may be named by its text. Raises ConfigError for a file that is
    no JSON object, and for an invalid token."""
    file, whole = folder / FILE, folder / "config.json"
    ids = (
        _ids_of_config(overrides or {}, "hf_overrides", tokenizer)
        or _listed_ids(_read(file), file, tokenizer)
        or _ids_of_config(_read(whole), whole, tokenizer)
    )
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = {*ids, tokenizer.eos_token_id}
    return tuple(sorted(ids))


def within_vocabulary(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids below `vocab_size`, and warns of others."""
    others = [id_ for id_ in ids if id_ >= vocab_size]
    if others:
        logger.warning(
            "end tokens %s are left out: the model has %d tokens", shown(others), vocab_size
        )
    return tuple(id_ for id_ in ids if id_ < vocab_size)


def sampling_defaults(folder: Path, wanted: GenerationConfig) -> dict[str, int | float]:
    """Returns the checkpoint's defaults for fields of SamplingParams. Like vLLM, it ignores
    `do_sample`. Raises ConfigError for invalid values, and for a file that is no JSON object."""
    if wanted != "auto":
        return {}
    path = folder / FILE
    config = _read(path)
    found = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    try:
        with reading(path):
            SamplingParams(**found)
    except (InvalidRequestError, ConfigError) as error:
        why = str(error).removeprefix(f"{path}: ")
        raise ConfigError(
            f"{path}: {why}; generation_config='none' leaves its sampling out"
        ) from error
    return found


def with_overrides(defaults: Mapping[str, int | float], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling defaults, overridden by an operator's. Raises ConfigError for unknown
    fields, and for values that are invalid in a request."""
    unknown = [name for name in given if name not in _SAMPLING]
    if unknown:
        raise ConfigError(f"override_generation_config: {unknown[0]!r}: use {', '.join(_SAMPLING)}")
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return {**defaults, **given}


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters of a request that sets the fields `given`. Raises
    InvalidRequestError."""
    return SamplingParams(**{**defaults, **given})


def _read(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty one if there is no such file."""
    return read_object(path) if path.exists() else {}


def _ids_of_config(
    config: Mapping[str, Any], where: Path | str, tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """Returns the ids that a model's configuration lists, or else its text part."""
    inner = config.get("text_config")
    return _listed_ids(config, where, tokenizer) or (
        _listed_ids(inner, where, tokenizer) if isinstance(inner, Mapping) else set()
    )


def _listed_ids(
    config: Mapping[str, Any], where: Path | str, tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """Returns the ids of tokens that end an answer, given as an id, a text, or a list of these."""
    given = config.get("eos_token_id")
    if given is None:
        return set()
    return {
        _id_of(each, given, where, tokenizer)
        for each in (given if isinstance(given, list) else [given])
    }


def _id_of(
    each: Any, given: Any, where: Path | str, tokenizer: PreTrainedTokenizerBase | None
) -> int:
    if type(each) is int and 0 <= each < _MAX_IDS:
        return each
    why = "use a token id, or a list"
    if isinstance(each, str):
        if tokenizer is None:
            why = "use a token id: its text needs a tokenizer, and there is none"
        elif each in (vocabulary := tokenizer.get_vocab()):
            return int(vocabulary[each])
        else:
            why = f"{each!r} is no token; use a token id"
    shown = repr(given)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    raise ConfigError(f"{where}: eos_token_id={shown}: {why}")
