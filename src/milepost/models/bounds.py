"""Bounds on the numbers in a configuration. They are checked before anything is computed from them,
so that no file makes an engine allocate, loop or divide by values that no real model has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from milepost.checks import is_number
from milepost.errors import UnsupportedModelError

MAX_LAYERS = 1024
MAX_EXPERTS = 2**17
"""Largest number of experts in all layers together."""
MAX_POSITIONS = 2**27

_WIDTH, _HEADS, _DIM = 2**18, 2**12, 2**14
_BOUNDS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "num_hidden_layers": (1, MAX_LAYERS),
    "max_position_embeddings": (1, MAX_POSITIONS),
    "num_dense_layers": (0, MAX_LAYERS),
    "first_k_dense_replace": (0, MAX_LAYERS),
    "full_attention_interval": (1, MAX_LAYERS),
    "layer_group_size": (1, MAX_LAYERS),
    "block_attn_res_block_size": (1, MAX_LAYERS),
    "decoder_sparse_step": (1, MAX_LAYERS),
    "mtp_num_hidden_layers": (0, MAX_LAYERS),
    "num_nextn_predict_layers": (0, MAX_LAYERS),
    "num_mtp_layers": (0, MAX_LAYERS),
    "block_multiple_of": (1, _WIDTH),
    "hc_count": (2, 16),
    "ngram_size": (2, 8),
    "heads_per_ngram": (1, 64),
    "ngram_vocab_size_base": (2, 2**26),
    "make_ngram_vocab_size_divisible_by": (1, 2**20),
    "split_ngram_parts": (1, 2**12),
    "indexer_kv_heads": (1, 1),
    "indexer_budget": (1, MAX_POSITIONS),
    "indexer_compress_ratio": (1, 2**12),
    "shared_expert_intermediate_size": (0, _WIDTH),
    "shared_intermediate_size": (0, _WIDTH),
    "moe_latent_size": (0, _WIDTH),
    "n_shared_experts": (0, 64),
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    "n_routed_experts": (0, 2**16),
    "num_experts_per_tok": (0, 2**10),
    "n_group": (1, 2**16),
    "topk_group": (1, 2**16),
    "qk_rope_head_dim": (0, _DIM),
    "sliding_window": (1, MAX_POSITIONS),
    **dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "moe_intermediate_size", "mamba_d_ssm"),
            *("moe_shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"),
            *("hc_lowrank", "ple_embed_dim"),
        ),
        (1, _WIDTH),
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_key_value_heads", "linear_num_key_heads"),
            *("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"),
            *("mamba_n_groups", "n_groups", "mamba_expand", "expand", "indexer_n_heads"),
        ),
        (1, _HEADS),
    ),
    **dict.fromkeys(
        (
            *("head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
            *("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"),
            *("qk_nope_head_dim", "v_head_dim", "mamba_chunk_size", "chunk_size"),
            "indexer_head_dim",
        ),
        (1, _DIM),
    ),
    **dict.fromkeys(
        (
            *("linear_conv_kernel_dim", "short_conv_kernel_size", "mamba_d_conv", "conv_kernel"),
            *("conv_L_cache", "ple_conv_kernel_size"),
        ),
        (2, 256),
    ),
}
"""Maps a setting to its smallest and largest value."""
_NULL = {"head_dim", "sliding_window", "q_lora_rank", "moe_latent_size", "topk_group", "n_group"}
_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")
_LENGTHS = {"time_step_limit": 2, "mlp_multipliers": 2, "ssm_multipliers": 5}
_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "initializer_range")
_MOST = 1e30
"""Limit for all numbers: float32 holds it, and a product with it."""
_INFINITE = ("time_step_limit",)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DIVISORS = ("logits_scaling",)
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""Limits of activations, layer by layer; 0 or null for none."""


def refuse_sizes(settings: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for the first number that no model can have. A missing or null
    setting has a default, or is reported once there is a configuration."""
    for name, (least, most) in _BOUNDS.items():
        value = settings.get(name)
        if value is None or (name == "mamba_d_head" and value == "auto"):
            continue
        if type(value) is not int or not least <= value <= most:
            raise _not_supported(name, value, f"a whole number from {least} to {most}")
    for name in _LAYERS:
        if isinstance(settings.get(name), list | str) and len(settings[name]) > MAX_LAYERS:
            raise _not_supported(name, "...", f"{MAX_LAYERS} layers or fewer")
    depth = settings.get("num_hidden_layers") or 1
    for name in _EXPERT_COUNTS:
        if depth * (settings.get(name) or 0) > MAX_EXPERTS:
            raise _not_supported(name, settings[name], f"{MAX_EXPERTS} in all layers together")
    _refuse_numbers(settings)
    _refuse_rotary(settings.get("rope_parameters"))


def refuse_missing(read: Callable[[str], Any]) -> None:
    """Raises UnsupportedModelError for a size that is null. `read` returns a setting's value, or
    False if the configuration does not have the setting."""
    for name in _BOUNDS:
        if name not in _NULL and read(name) is None:
            raise _not_supported(name, None, "a number")


def refuse_positions(count: float) -> None:
    """Raises UnsupportedModelError unless this number of positions, after scaling, is supported."""
    if not 1 <= count <= MAX_POSITIONS:
        raise UnsupportedModelError(
            f"max_position_embeddings and rope_parameters make {count} positions; supported are 1 "
            f"to {MAX_POSITIONS}"
        )


def _refuse_numbers(settings: Mapping[str, Any]) -> None:
    """Checks the numbers of all settings. Infinity and NaN fail the comparison with the limit."""
    for name, value in settings.items():
        for each in value if isinstance(value, list) else [value]:
            is_infinite = name in _INFINITE and each in (math.inf, -math.inf)
            if is_number(each) and not is_infinite and not abs(each) < _MOST:
                raise _not_supported(name, each, f"a number below {_MOST:g}")
    for name in _EPS:
        value = settings.get(name)
        if value is not None and not (is_number(value) and 0 <= value <= 1):
            raise _not_supported(name, value, "a number from 0 to 1")
    for name in _DIVISORS:
        if settings.get(name) == 0:
            raise _not_supported(name, 0, "another number")
    for name in _LIMITS:
        value = settings.get(name)
        each = [number or 0 for number in value] if isinstance(value, list) else [None]
        if value is not None and not all(is_number(number) and number >= 0 for number in each):
            raise _not_supported(name, value, "a list of numbers from 0 on")
    least = settings.get("kda_lower_bound")
    if least is not None and not (is_number(least) and least < 0):
        raise _not_supported("kda_lower_bound", least, "a number below 0")
    for name, length in _LENGTHS.items():
        value = settings.get(name)
        is_list = isinstance(value, list | tuple) and len(value) == length
        if value is not None and not (is_list and all(map(is_number, value))):
            raise _not_supported(name, value, f"a list of {length} numbers")


def _refuse_rotary(parameters: object) -> None:
    if not isinstance(parameters, Mapping):
        return
    for name, value in parameters.items():
        _refuse_rotary(value)  # the parameters of one layer type
        is_list = isinstance(value, list)
        for each in value if is_list else [value]:
            if is_number(each) and not abs(each) < _MOST:
                raise _not_supported(f"rope_parameters.{name}", each, f"a number below {_MOST:g}")
        if name == "rope_type" and not isinstance(value, str):
            raise _not_supported(f"rope_parameters.{name}", value, "a name")
        if name in _ROTARY and value is not None:
            is_fit, wanted = _ROTARY[name]
            if not is_number(value) or not is_fit(value):
                raise _not_supported(f"rope_parameters.{name}", value, wanted)
        if name.endswith("_factor") and is_list and not all(is_number(v) and v for v in value):
            raise _not_supported(f"rope_parameters.{name}", value, "a list of numbers but 0")


_ROTARY: dict[str, tuple[Callable[[float], bool], str]] = {
    "rope_theta": (lambda value: value > 0, "a number above 0"),
    "factor": (lambda value: 1 <= value <= MAX_POSITIONS, "a number of 1 or more"),
    "partial_rotary_factor": (lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "original_max_position_embeddings": (
        lambda value: type(value) is int and 1 <= value <= MAX_POSITIONS,
        f"a whole number from 1 to {MAX_POSITIONS}",
    ),
    **dict.fromkeys(
        ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
        (lambda value: value > 0, "a number above 0"),
    ),
}


def _not_supported(name: str, value: object, wanted: str) -> UnsupportedModelError:
    shown = "..." if value == "..." else repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return UnsupportedModelError(f"{name}={shown} is not supported; supported is {wanted}")
