"""LFM2, dense and with experts. Mixers are gated short convolutions, or attention with norms on
query and key heads. A feed-forward follows each; all but the first few may have experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import Lfm2Config, PreTrainedConfig

from milepost.kernels.products import Scores
from milepost.layers.attention import Attention, AttentionNames
from milepost.layers.experts import ExpertNames
from milepost.layers.mlp import MLP
from milepost.layers.moe import ExpertShapes, MoE
from milepost.layers.parameters import ModuleScope
from milepost.layers.rotary import Rotary
from milepost.layers.short_conv import ShortConv
from milepost.models.architecture import (
    Architecture,
    attention_shapes,
    is_true_or_unset,
    norm_of,
    plain_layer,
)
from milepost.models.decoder import DecoderParts
from milepost.models.names import listed_layers, take_same
from milepost.models.towers import siglip_tower

_NAMES = AttentionNames(out="out_proj", query_norm="q_layernorm", key_norm="k_layernorm")
_GATE_UP_DOWN = "w1", "w3", "w2"
_NORMS = "operator_norm", "ffn_norm"
_EXPERT_NAMES = ExpertNames(bias="expert_bias", projections=_GATE_UP_DOWN)

FeedForward = Callable[[int, ModuleScope], MLP | MoE]
"""Builds a layer's feed-forward from the layer's index and the scope of its tensors."""


def _dense(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    size = _feed_forward_size(config)

    def feed_forward(_: int, scope: ModuleScope) -> MLP:
        return MLP(config.hidden_size, size, scope, _GATE_UP_DOWN)

    return _parts(config, scope, feed_forward)


def _sparse(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    shapes = ExpertShapes(
        num_experts=config.num_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        shared_size=0,
        normalise=config.norm_topk_prob,
        scores=Scores(kind="sigmoid", norm_eps=1e-6, scale=config.routed_scaling_factor),
        has_bias=config.use_expert_bias,
    )

    def feed_forward(index: int, scope: ModuleScope) -> MLP | MoE:
        if index < config.num_dense_layers:
            return MLP(config.hidden_size, config.intermediate_size, scope, _GATE_UP_DOWN)
        return MoE(config.hidden_size, shapes, scope, _EXPERT_NAMES)

    return _parts(config, scope, feed_forward)


def _parts(config: PreTrainedConfig, scope: ModuleScope, feed_forward: FeedForward) -> DecoderParts:
    size, eps, rotary = config.hidden_size, config.norm_eps, Rotary(config, scope.device)
    attention = attention_shapes(config, norm="each", norm_eps=eps, bias=False)
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        mixer = (
            Attention(attention, inner.under("self_attn"), rotary=rotary, names=_NAMES)
            if layer_type == "full_attention"
            else ShortConv(size, config.conv_L_cache, inner.under("conv"), bias=config.conv_bias)
        )
        mlp = feed_forward(index, inner.under("feed_forward"))
        layers.append(plain_layer(config, inner, mixer, mlp, norms=_NORMS, eps=eps))
    norm = norm_of(config, scope.under("embedding_norm"), eps=eps)
    return DecoderParts(layers=layers, norm=norm)


def _feed_forward_size(config: PreTrainedConfig) -> int:
    """Returns two thirds of the configured size, times a factor, rounded up; or the configured size
    if it is not to be adjusted."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    step = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * size) // step) * step


def _settle_dense(settings: dict[str, Any]) -> None:
    """Merges `block_ff_dim`, the size before adjustment, with `intermediate_size`, which may be the
    size before or after it."""
    _settle(settings)
    size = settings.pop("block_ff_dim", None)
    if size is None:
        return
    given = settings.get("intermediate_size")
    settings["intermediate_size"] = size
    config = Lfm2Config(**{name: settings[name] for name in _SIZES if name in settings})
    if given != _feed_forward_size(config):
        take_same({"intermediate_size": given}, "intermediate_size", "block_ff_dim", size)


def _settle_sparse(settings: dict[str, Any]) -> None:
    _settle(settings)
    take_same(settings, "intermediate_size", "block_ff_dim", settings.pop("block_ff_dim", None))


def _settle(settings: dict[str, Any]) -> None:
    """Converts indices of layers with attention to a list of layer types."""
    indices = settings.pop("full_attn_idxs", None)
    if indices is not None:
        listed = listed_layers(settings, indices, "full_attn_idxs", "conv")
        take_same(settings, "layer_types", "full_attn_idxs", listed)
    for name in ("conv_dim", "conv_dim_out"):
        take_same({name: settings.get("hidden_size")}, name, "hidden_size", settings.get(name))


_SIZES = (
    *("intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier"),
    "block_multiple_of",
)
_REQUIREMENTS = {
    "hidden_act": (lambda value: value in (None, "silu", "swish"), "silu"),
    "block_use_swiglu": (is_true_or_unset, "true"),
    "use_pos_enc": (is_true_or_unset, "true"),
}


def _family(
    model_types: tuple[str, ...],
    build: Callable[[PreTrainedConfig, ModuleScope], DecoderParts],
    settle: Callable[[dict[str, Any]], None],
) -> Architecture:
    return Architecture(
        model_types=model_types,
        build=build,
        layer_types=("full_attention", "conv"),
        requirements=_REQUIREMENTS,
        aliases={
            "tie_embedding": "tie_word_embeddings",
            "block_dim": "hidden_size",
            "block_norm_eps": "norm_eps",
            "num_heads": "num_attention_heads",
        },
        spellings=(("layer_types", "full_attn_idxs"), ("intermediate_size", "block_ff_dim")),
        settle=settle,
    )


_PLAIN = _family(model_types=("lfm2",), build=_dense, settle=_settle_dense)
ARCHITECTURES = (
    _PLAIN,
    replace(  # LFM2-VL and LFM2.5-VL
        _PLAIN,
        model_types=("lfm2_vl",),
        text_types=("lfm2",),
        tower=siglip_tower,
        tower_path="model.vision_tower",
        skipped=(r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\."),
    ),
    _family(model_types=("lfm2_moe",), build=_sparse, settle=_settle_sparse),
)
