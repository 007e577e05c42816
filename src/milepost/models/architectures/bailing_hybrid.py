"""Ling 3.0: Kimi Delta Attention with bounded decays, and gated latent attention with rotary
positions in every fourth or sixth layer. All but the first layers have grouped experts; in the last
ones, the experts' activations are limited."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, DeepseekV3Config, PreTrainedConfig

from milepost.layers.experts import ExpertNames
from milepost.layers.kda import KDA
from milepost.layers.mla import MLA
from milepost.layers.mlp import MLP
from milepost.layers.moe import MoE
from milepost.layers.mtp import FIRST_ROW, HeadNames, MTPHead
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Part
from milepost.layers.rotary import Rotary
from milepost.models.architecture import (
    Architecture,
    grouped_shapes,
    is_unset,
    kda_shapes,
    latent_shapes,
    norm_of,
    only,
    plain_layer,
)
from milepost.models.decoder import DecoderParts
from milepost.models.names import listed_layers, name_dense_layers, take_same

_EXPERTS = ExpertNames(shared="shared_experts", bias="gate.expert_bias")
_HEAD = HeadNames(norm_embedding="enorm", norm_hidden="hnorm", fc="eh_proj", norm="final_layernorm")
_LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    rotary, layers = Rotary(config, scope.device), []
    least = config.kda_lower_bound if config.kda_safe_gate else 0.0
    delta = kda_shapes(config, least_decay=least, is_full_rank=True)
    kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
    for index, (layer_type, mlp_type) in enumerate(kinds):
        inner = scope.under(f"layers.{index}")
        mixer: Part
        mlp: Part
        if layer_type == "full_attention":
            mixer = _attention(config, inner, rotary)
        else:
            mixer = KDA(delta, inner.under("attention"))
        if mlp_type == "dense":
            mlp = MLP(config.hidden_size, config.intermediate_size, inner.under("mlp"))
        else:
            mlp = _mixture(config, inner, index)
        layers.append(plain_layer(config, inner, mixer, mlp))
    return DecoderParts(layers=layers, norm=norm_of(config, scope.under("norm")))


def _head(config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary) -> MTPHead:
    attention = _attention(config, scope, rotary, first_row=FIRST_ROW)
    mlp = _mixture(config, scope, config.num_hidden_layers)
    layer = plain_layer(config, scope, attention, mlp)
    return MTPHead(config.hidden_size, layer, scope, eps=config.rms_norm_eps, names=_HEAD)


def _attention(
    config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary, *, first_row: int = 0
) -> MLA:
    shapes = latent_shapes(config, query_rank=config.q_lora_rank or 0, has_gate=True)
    return MLA(shapes, scope.under("attention"), rotary=rotary, out="dense", first_row=first_row)


def _mixture(config: PreTrainedConfig, scope: ModuleScope, index: int) -> MoE:
    """Builds the experts of a layer. transformers ignores the limits of their activations; the
    engines that Ling 3.0 was published with do not."""
    listed = (getattr(config, name, None) or () for name in _LIMITS)
    limits = [float(each[index] or 0) if index < len(each) else 0.0 for each in listed]
    shapes = grouped_shapes(config, limit=limits[0], shared_limit=limits[1])
    return MoE(config.hidden_size, shapes, scope.under("mlp"), _EXPERTS)


def _settle(settings: dict[str, Any]) -> None:
    """Converts the size of groups of layers to layer types: the last layer of a group has
    attention, and so have all layers after the last whole group."""
    count, size = settings.get("num_hidden_layers"), settings.get("layer_group_size")
    if isinstance(count, int) and size is not None:
        whole = count // size * size
        chosen = [each for each in range(count) if (each + 1) % size == 0 or each >= whole]
        listed = listed_layers(settings, chosen, "layer_group_size", "linear_attention")
        take_same(settings, "layer_types", f"layer_group_size={size}", listed)
    name_dense_layers(settings)
    # All entries that heads share are turned, whatever part of a head they would be.
    (settings.get("rope_parameters") or {}).pop("partial_rotary_factor", None)
    settings.setdefault("q_lora_rank", None)
    for name, published in _PUBLISHED.items():
        settings.setdefault(name, settings.get(published))


_PUBLISHED = {"linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim"}
_PUBLISHED |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
_SPELLINGS = ("layer_types", "layer_group_size"), ("mlp_layer_types", "first_k_dense_replace")
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_nextn_predict_layers": "num_mtp_layers",
    "num_shared_experts": "n_shared_experts",
}
_OFF = (
    *("attention_bias", "use_bias", "use_qkv_bias", "use_mla_nope", "mla_use_nope", "mtp_use_kda"),
    *("use_kda_lora", "use_nGPT", "up_proj_norm", "value_norm", "scale_router_input"),
)
_ON = ("no_kda_lora", "use_qk_norm", "linear_silu", "rope_interleave")
_ONLY = dict.fromkeys((*_ON, "moe_router_enable_expert_bias"), True) | {
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "router_dtype": "fp32",
    "routing_group_score_top_k": 2,
    **dict.fromkeys(("score_function", "scoring_func"), "sigmoid"),
    "topk_method": "noaux_tc",
}


class BailingHybridConfig(DeepseekV3Config):
    """The configuration where transformers has none; settings without a field are kept too."""

    model_type = "bailing_hybrid"


if "bailing_hybrid" not in CONFIG_MAPPING:
    AutoConfig.register("bailing_hybrid", BailingHybridConfig)
ARCHITECTURES = (
    Architecture(
        model_types=("bailing_hybrid",),
        build=_parts,
        head=_head,
        head_at="model.layers.{depth}",
        aliases=_ALIASES,
        spellings=_SPELLINGS,
        settle=_settle,
        requirements=dict.fromkeys(_OFF, (is_unset, "false")) | only(**_ONLY),
        embedding="word_embeddings",
    ),
)
