"""Reads a checkpoint's generation_config.json: which tokens end an answer, and the recommended
sampling.

Knows folders in Hugging Face format; does not know models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.config import GenerationConfig
from milepost.errors import ConfigError, InvalidRequestError
from milepost.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "generation_config.json"

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that have the same name in SamplingParams."""


def end_token_ids(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The ids that end an answer, sorted: those of generation_config.json and the tokenizer's own.

    A checkpoint without generation_config.json is asked through config.json; what `overrides`
    says, which stands in place of config.json, comes before both. Raises ConfigError for a file
    that is no JSON object, and for overrides that are no token ids.
    """
    ids = _overridden_ids(overrides or {})
    if not ids:
        ids = _listed_ids(_read(folder / FILE))
    if not ids:
        config = _read(folder / "config.json")
        ids = _listed_ids(config) or _listed_ids(config.get("text_config") or {})
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = {*ids, tokenizer.eos_token_id}
    return tuple(sorted(ids))


def sampling_defaults(folder: Path, wanted: GenerationConfig) -> dict[str, int | float]:
    """Fields of SamplingParams that the checkpoint sets, for requests that do not set them.

    As in vLLM, `do_sample` is not asked. Raises ConfigError for values that no request could have,
    or for a file that is no JSON object.
    """
    if wanted != "auto":
        return {}
    config = _read(folder / FILE)
    found = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ConfigError(
            f"{folder / FILE}: {error}; generation_config='none' leaves its sampling out"
        ) from error
    return found


def overridden(defaults: Mapping[str, int | float], given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults with those of an operator before them. Raises ConfigError for fields that
    are none, and for values that no request could have.
    """
    unknown = [name for name in given if name not in _SAMPLING]
    if unknown:
        raise ConfigError(f"override_generation_config: {unknown[0]!r}: use {', '.join(_SAMPLING)}")
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return {**defaults, **given}


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a request that sets the fields `given`. Raises InvalidRequestError."""
    return SamplingParams(**{**defaults, **given})


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: it should be a JSON object")
    return content


def _overridden_ids(overrides: Mapping[str, Any]) -> set[int]:
    inner = overrides.get("text_config")
    for given in (overrides, inner if isinstance(inner, Mapping) else {}):
        try:
            found = _listed_ids(given)
        except TypeError:  # a list of lists
            found = {-1}
        if any(type(id_) is not int or id_ < 0 for id_ in found):
            raise ConfigError(
                f"hf_overrides: eos_token_id={given['eos_token_id']!r}: use a token id, or a list"
            )
        if found:
            return found
    return set()


def _listed_ids(config: Mapping[str, Any]) -> set[int]:
    ids = config.get("eos_token_id")
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}
