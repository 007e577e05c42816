"""Gives each setting one name and one place, whatever a file or an override calls it.

Configurations use old names and new ones, flat settings and nested ones, lists and rules that
generate them. All are converted to the names of transformers' class before anything reads them. A
setting that is given twice is accepted if both values agree, and refused if not. An override
replaces all other names of its setting, and leaves neighbouring settings alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from milepost.errors import ConfigError, UnsupportedModelError
from milepost.models.architecture import Architecture
from milepost.models.bounds import refuse_sizes

ConfigValues = dict[str, Any]

TEXT = "text_config"
_OVERRIDES = "hf_overrides"
_ROPE = "rope_parameters"
_ALIASES = {"torch_dtype": "dtype"}
_OF_TEXT = {"llm_config": TEXT}
"""Other names of the text part."""
_ROPE_NAMES = ("rope_scaling", "rope_theta", "partial_rotary_factor")
"""Settings next to `rope_parameters`, or instead of it, before transformers 5."""
_ROPE_TYPES = {"mrope": "default", "su": "longrope"}
_ORIGINAL = "original_max_position_embeddings"
_STRETCHED = ("llama3", "yarn", "longrope")
"""RoPE types that read the original length."""
_UNREAD = {
    *("num_labels", "id2label", "label2id", "problem_type", "configuration_files"),
    *("_commit_hash", "_name_or_path", "name_or_path"),
}
"""Settings for tasks that are not supported, or about a file's origin; they are dropped and never
used."""
_WITHOUT_RESULT = {
    *("use_cache", "attention_dropout", "initializer_range", "output_router_logits"),
    *("router_aux_loss_coef", "bos_token_id", "eos_token_id", "pad_token_id", "model_type"),
}
"""Settings that may differ between the outer configuration and the text part."""


def read_settings(
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any],
    architecture: Architecture,
    kind: type[PreTrainedConfig],
) -> ConfigValues:
    """Returns settings under the names of `kind`, the architecture's configuration class, with
    `overrides` applied. Raises ConfigError for a setting that is given twice with different values,
    for an override of a setting that the configuration does not have, and for numbers that no model
    has."""
    inner = _inner(kind, architecture)
    settings, given = _copied(raw), _copied(overrides)
    if inner is not None:
        _rename(settings, _OF_TEXT, "")
        _rename(given, _OF_TEXT, _OVERRIDES)
    settings = _renamed(_nested(settings, kind, inner), architecture, kind, "")
    given = _renamed(given, architecture, kind, _OVERRIDES)
    _check_known(given, settings, architecture, kind)
    _leave_out_others(settings, given, architecture)
    merged = _merged(settings, given)
    text = merged[TEXT] if inner is not None else merged
    refuse_sizes(text)
    if architecture.settle is not None:
        architecture.settle(text)
        refuse_sizes(text)
    _check_lengths(text)
    _drop_unread_length(text)
    return merged


def take_same(settings: ConfigValues, name: str, other: str, value: Any, where: str = "") -> None:
    """Sets `name` to the value found as `other`. Raises ConfigError if it already has a different
    value. Null is no value."""
    if settings.get(name) is None:
        settings[name] = value
    elif value is not None and settings[name] != value:
        _refuse_two(where, name, settings[name], other, value)


def _refuse_two(where: str, name: str, value: Any, other: str, another: Any) -> None:
    raise _error(
        where,
        f"{name}={value!r} and {other}={another!r} are one setting with two values: leave one out",
    )


def _error(where: str, message: str) -> ConfigError:
    """Returns an error about an override, or about the file; whoever reads the file adds its
    path."""
    return ConfigError(f"{where}: {message}") if where else UnsupportedModelError(message)


def _inner(
    kind: type[PreTrainedConfig], architecture: Architecture
) -> type[PreTrainedConfig] | None:
    """Returns the class of the text part, if a configuration has one."""
    text_class = kind.sub_configs.get(TEXT)
    if text_class is AutoConfig:
        return CONFIG_MAPPING[architecture.text_types[0]]
    return text_class if text_class is None or isinstance(text_class, type) else None


def _fields(kind: type[PreTrainedConfig]) -> set[str]:
    return {each.name for each in fields(kind)}


def _copied(value: Any) -> Any:
    """Returns a deep copy of objects and lists, which are changed below; other values are
    shared."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items() if key not in _UNREAD}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _nested(
    raw: ConfigValues, kind: type[PreTrainedConfig], inner: type[PreTrainedConfig] | None
) -> ConfigValues:
    """Returns settings with those of the text part in `text_config`, even if a file has them
    flat."""
    if inner is None:
        return raw
    text = raw.get(TEXT)
    if text is not None and not isinstance(text, dict):
        raise UnsupportedModelError(f"{TEXT}={text!r} is no object")
    outer = _fields(kind) | {"quantization_config", "compression_config", "torch_dtype"}
    if not text:
        flat = {name: value for name, value in raw.items() if name not in outer}
        kept = {name: value for name, value in raw.items() if name in outer}
        flat.pop("model_type", None)
        if not _fields(inner) & set(flat) - _WITHOUT_RESULT:
            raise UnsupportedModelError(f"{TEXT} is missing, so the model has no sizes")
        return {**kept, "model_type": raw.get("model_type"), TEXT: flat}
    readable = _fields(inner) | set(_ROPE_NAMES)
    for name in sorted(set(raw) & (readable - outer - _WITHOUT_RESULT)):
        if name not in text or text[name] != raw[name]:
            _refuse_two("", name, raw[name], f"{TEXT}.{name}", text.get(name))
    # The outer configuration says whether a head is tied; if it does not, the text part does.
    take = text.get("tie_word_embeddings")
    if take is not None and raw.get("tie_word_embeddings") is None:
        raw["tie_word_embeddings"] = take
    return raw


def _renamed(
    settings: ConfigValues, architecture: Architecture, kind: type[PreTrainedConfig], where: str
) -> ConfigValues:
    """Renames settings to those of the class, and of the text part's class, in place."""
    inner = _inner(kind, architecture)
    if inner is None:
        _rename(settings, _ALIASES | dict(architecture.aliases), where)
        if _ROPE in _fields(kind):
            _gather_rope(settings, where)
        return settings
    _rename(settings, _ALIASES, where)
    text = settings.get(TEXT)
    if isinstance(text, dict):
        _refuse_other_type(text, architecture, where)
        _renamed(text, architecture, inner, where)
    return settings


def _refuse_other_type(text: ConfigValues, architecture: Architecture, where: str) -> None:
    declared = text.get("model_type")
    types = architecture.text_types or architecture.model_types
    if declared is not None and declared not in types:
        known = " or ".join(types)
        raise _error(where, f"{TEXT}.model_type={declared!r} does not belong to {known}")


def _rename(settings: ConfigValues, aliases: Mapping[str, str], where: str) -> None:
    """Moves values from aliases to the names that they stand for; `a.b` is b in the object a."""
    for alias, name in aliases.items():
        owner, _, last = alias.rpartition(".")
        holder = settings.get(owner) if owner else settings
        if isinstance(holder, dict) and last in holder:
            take_same(settings, name, alias, holder.pop(last), where)


def _gather_rope(settings: ConfigValues, where: str) -> None:
    """Collects all settings of rotary positions in `rope_parameters`."""
    given = [name for name in (_ROPE, *_ROPE_NAMES, _ORIGINAL) if name in settings]
    if not given or (given == [_ROPE] and settings[_ROPE] is None):
        return
    rope: ConfigValues = {}
    for name in given:
        value = settings.pop(name)
        if name in (_ROPE, "rope_scaling"):
            if value is None and where == _OVERRIDES:
                value = {"rope_type": "default"}
            if not isinstance(value, dict | None):
                raise _error(where, f"{name}={value!r} is no object")
            for key, each in (value or {}).items():
                _take_rope(rope, key, f"{name}.{key}", each, where)
        else:
            _take_rope(rope, name, name, value, where)
    settings[_ROPE] = rope


def _take_rope(found: ConfigValues, key: str, other: str, value: Any, where: str) -> None:
    if key in ("type", "rope_type"):
        key, value = "rope_type", _ROPE_TYPES.get(value, value) if isinstance(value, str) else value
    if key in found and None not in (found[key], value) and found[key] != value:
        _refuse_two(where, f"{_ROPE}.{key}", found[key], other, value)
    found[key] = value if found.get(key) is None else found[key]


def _check_known(
    given: ConfigValues, raw: ConfigValues, architecture: Architecture, kind: type[PreTrainedConfig]
) -> None:
    """Raises ConfigError for an override of a setting that nothing reads."""
    inner = _inner(kind, architecture)
    spelled = {name for names in architecture.spellings for name in names}
    spelled.add("num_hidden_layers")  # some models derive it from the length of a list
    for name in given:
        known = _fields(kind) | set(raw) | (spelled if inner is None else {TEXT})
        if name in known:
            continue
        hint = ": those of the text model stand in text_config" if inner is not None else ""
        raise ConfigError(f"hf_overrides: config.json has no {name} to override{hint}")
    if given.get("model_type", raw["model_type"]) != raw["model_type"]:
        raise ConfigError(
            f"hf_overrides: model_type={given['model_type']!r}: the file's is "
            f"{raw['model_type']!r}, and its settings are that model's; edit config.json in a copy "
            "of the checkpoint"
        )
    text = given.get(TEXT)
    if inner is None or text is None:
        return
    if not isinstance(text, dict):
        raise ConfigError(f"hf_overrides: {TEXT}={text!r} is no object")
    for name in text:
        if name not in _fields(inner) | set(raw[TEXT]) | spelled:
            raise ConfigError(f"hf_overrides: config.json has no {TEXT}.{name} to override")


def _leave_out_others(raw: ConfigValues, given: ConfigValues, architecture: Architecture) -> None:
    """Drops the file's settings that express the same as an override."""
    if isinstance(given.get(TEXT), dict):
        _leave_out_others(raw[TEXT], given[TEXT], architecture)
    for names in architecture.spellings:
        if any(name in given for name in names):
            for name in names:
                raw.pop(name, None)


def _merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> ConfigValues:
    merged = dict(raw)
    for name, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(inner := merged.get(name), Mapping):
            value = _merged(inner, value)
        merged[name] = value
    return merged


def _check_lengths(text: ConfigValues) -> None:
    """Raises ConfigError if lists of layers differ in length from the model's depth."""
    count = text.get("num_hidden_layers")
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        listed = text.get(name)
        if isinstance(listed, list) and isinstance(count, int) and len(listed) != count:
            raise UnsupportedModelError(
                f"{name} has {len(listed)} layers and num_hidden_layers={count}: they are one "
                "setting with two values"
            )


def _drop_unread_length(text: ConfigValues) -> None:
    rope = text.get(_ROPE)
    if isinstance(rope, dict) and rope.get("rope_type", "default") not in _STRETCHED:
        rope.pop(_ORIGINAL, None)


def name_dense_layers(settings: ConfigValues) -> None:
    """Converts the number of dense layers, which are the first ones, to a list of layer types."""
    num_dense, count = settings.get("first_k_dense_replace"), settings.get("num_hidden_layers")
    if num_dense is not None and isinstance(count, int):
        kinds = ["dense" if index < num_dense else "sparse" for index in range(count)]
        take_same(settings, "mlp_layer_types", "first_k_dense_replace", kinds)


def listed_layers(
    settings: ConfigValues, indices: Iterable[Any], name: str, others: str
) -> list[str]:
    """Returns the types of all layers, given the indices of those with attention. Raises
    UnsupportedModelError for an index that no layer has."""
    count = settings.get("num_hidden_layers")
    if not isinstance(count, int):
        raise UnsupportedModelError(f"{name} needs num_hidden_layers, which is {count!r}")
    chosen = dict.fromkeys(indices if isinstance(indices, list | tuple) else [indices])
    for index in chosen:
        if type(index) is not int or not 0 <= index < count:
            raise UnsupportedModelError(f"{name} has {index!r}: use indices from 0 to {count - 1}")
    return ["full_attention" if index in chosen else others for index in range(count)]
