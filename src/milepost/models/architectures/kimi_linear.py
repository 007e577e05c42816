"""Kimi Linear: Kimi Delta Attention, and latent attention without positions in about every fourth
layer; experts after all but the first layers, one of them shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.experts import ExpertNames
from milepost.layers.kda import KDA
from milepost.layers.mla import MLA
from milepost.layers.mlp import MLP
from milepost.layers.moe import MoE
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Part
from milepost.models.architecture import (
    Architecture,
    grouped_shapes,
    is_true_or_unset,
    is_unset,
    kda_shapes,
    latent_shapes,
    norm_of,
    only,
    plain_layer,
)
from milepost.models.decoder import DecoderParts
from milepost.models.names import listed_layers, name_dense_layers, take_same

_EXPERT_NAMES = ExpertNames(shared="shared_experts", projections=("w1", "w3", "w2"))


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    hidden_size, experts = config.hidden_size, grouped_shapes(config)
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        mixer_scope = inner.under("self_attn")
        mixer: Part
        mlp: Part
        if layer_type == "full_attention":
            mixer = MLA(latent_shapes(config), mixer_scope)
        else:
            mixer = KDA(kda_shapes(config), mixer_scope)
        if config.mlp_layer_types[index] == "dense":
            mlp = MLP(hidden_size, config.intermediate_size, _feed_forward(inner, "gate_proj"))
        else:
            mlp = MoE(hidden_size, experts, _feed_forward(inner, "gate"), _EXPERT_NAMES)
        layers.append(plain_layer(config, inner, mixer, mlp))
    return DecoderParts(layers=layers, norm=norm_of(config, scope.under("norm")))


def _feed_forward(scope: ModuleScope, projection: str) -> ModuleScope:
    """Returns the path of a layer's feed-forward. Published checkpoints use a different path for
    experts; transformers uses one for all layers."""
    sparse = scope.under("block_sparse_moe")
    return sparse if sparse.has_projection(projection) else scope.under("mlp")


def _has_kda_alone(value: Mapping[str, object] | None) -> bool:
    """Whether decays have no lower bound and gates are low-rank, as supported here."""
    settings = value or {}
    return settings.get("gate_lower_bound") is None and not settings.get("use_full_rank_gate")


_NESTED = "linear_attn_config"
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    f"{_NESTED}.head_dim": "linear_head_dim",
    f"{_NESTED}.num_heads": "linear_num_heads",
    f"{_NESTED}.short_conv_kernel_size": "linear_conv_kernel_dim",
    f"{_NESTED}.full_attn_layers": "full_attn_layers",
    f"{_NESTED}.kda_layers": "kda_layers",
}
_SPELLINGS = (
    ("layer_types", "full_attn_layers", "kda_layers"),
    ("mlp_layer_types", "first_k_dense_replace"),
)


def _settle(settings: dict[str, Any]) -> None:
    """Converts lists of layers, which count from 1, and the number of dense layers to layer
    types."""
    if not isinstance(settings.get(_NESTED, {}), dict):
        raise UnsupportedModelError(f"{_NESTED}={settings[_NESTED]!r} is no object")
    full, delta = (settings.pop(name, None) for name in _SPELLINGS[0][1:])
    if full is not None or delta is not None:
        count, every = settings.get("num_hidden_layers"), [*(full or ()), *(delta or ())]
        if not isinstance(count, int) or sorted(every) != list(range(1, count + 1)):
            raise UnsupportedModelError(
                "full_attn_layers and kda_layers have to name each layer once, from 1 to "
                f"num_hidden_layers={count}"
            )
        indices = [number - 1 for number in full or ()]
        listed = listed_layers(settings, indices, "full_attn_layers", "linear_attention")
        take_same(settings, "layer_types", "full_attn_layers", listed)
    name_dense_layers(settings)


ARCHITECTURES = (
    Architecture(
        model_types=("kimi_linear",),
        build=_parts,
        aliases=_ALIASES,
        spellings=_SPELLINGS,
        settle=_settle,
        requirements={
            "attention_bias": (is_unset, "false"),
            "attn_res_block_size": (is_unset, "none"),
            "linear_attn_config": (_has_kda_alone, "one without the settings of Kimi K3"),
            "mla_use_output_gate": (is_unset, "false"),
            "mla_use_nope": (is_true_or_unset, "true"),
            "num_nextn_predict_layers": (is_unset, "0"),
            "q_lora_rank": (lambda value: value is None, "none"),
            "routed_expert_hidden_size": (is_unset, "none"),
            "use_grouped_topk": (is_true_or_unset, "true"),
            **only(moe_layer_freq=1, moe_router_activation_func="sigmoid", topk_method="noaux_tc"),
        },
    ),
)
