"""Kimi Linear: Kimi Delta Attention, and latent attention without positions in every fourth layer
or so; experts behind all but the first layers, one of them shared."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from milepost.kernels.moe import Scores
from milepost.layers.kda import KDA, KDAShapes
from milepost.layers.mla import MLA, MLAShapes
from milepost.layers.mlp import MLP
from milepost.layers.moe import ExpertNames, ExpertShapes, MoE
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ParameterKind
from milepost.layers.parts import Block, Layer
from milepost.models.architecture import Architecture, is_true_or_unset, is_unset
from milepost.models.decoder import DecoderParts

_EXPERT_NAMES = ExpertNames(shared="shared_experts", projections=("w1", "w3", "w2"))


def _parts(config: PreTrainedConfig, kind: ParameterKind) -> DecoderParts:
    hidden_size, experts = config.hidden_size, _expert_shapes(config)
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        own = kind.under(f"layers.{index}")
        mixer_kind = own.under("self_attn")
        if layer_type == "full_attention":
            mixer = MLA(_latent_shapes(config), mixer_kind)
        else:
            mixer = KDA(_delta_shapes(config), mixer_kind)
        if config.mlp_layer_types[index] == "dense":
            mlp = MLP(hidden_size, config.intermediate_size, _feed_forward(own, "gate_proj"))
        else:
            mlp = MoE(hidden_size, experts, _feed_forward(own, "gate"), _EXPERT_NAMES)
        layers.append(
            Layer(
                Block(mixer, pre=_norm(config, own.under("input_layernorm"))),
                Block(mlp, pre=_norm(config, own.under("post_attention_layernorm"))),
            )
        )
    return DecoderParts(layers=layers, norm=_norm(config, kind.under("norm")))


def _feed_forward(kind: ParameterKind, projection: str) -> ParameterKind:
    """Where a layer's feed-forward stands: published checkpoints have experts under a name of their
    own, transformers gives that to all or to none."""
    own = kind.under("block_sparse_moe")
    return own if own.has_projection(projection) else kind.under("mlp")


def _delta_shapes(config: PreTrainedConfig) -> KDAShapes:
    return KDAShapes(
        hidden_size=config.hidden_size,
        num_heads=config.linear_num_heads,
        head_dim=config.linear_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
    )


def _latent_shapes(config: PreTrainedConfig) -> MLAShapes:
    return MLAShapes(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        latent_dim=config.kv_lora_rank,
        own_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
    )


def _expert_shapes(config: PreTrainedConfig) -> ExpertShapes:
    return ExpertShapes(
        num_experts=config.num_local_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        shared_size=config.moe_intermediate_size * config.n_shared_experts,
        normalise=config.norm_topk_prob,
        scores=Scores(
            kind="sigmoid",
            num_groups=config.n_group,
            num_groups_chosen=config.topk_group,
            norm_eps=1e-20,
            scale=config.routed_scaling_factor,
            gates_shared=False,
        ),
        has_bias=True,
    )


def _norm(config: PreTrainedConfig, kind: ParameterKind) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, kind)


def _has_kda_alone(value: Mapping[str, object] | None) -> bool:
    """Decays without a bound, gates of low rank."""
    own = value or {}
    return own.get("gate_lower_bound") is None and not own.get("use_full_rank_gate")


ARCHITECTURES = (
    Architecture(
        model_types=("kimi_linear",),
        build=_parts,
        requirements={
            "attention_bias": (is_unset, "false"),
            "attn_res_block_size": (is_unset, "none"),
            "linear_attn_config": (_has_kda_alone, "one without the settings of Kimi K3"),
            "mla_use_output_gate": (is_unset, "false"),
            "mla_use_nope": (is_true_or_unset, "true"),
            "moe_layer_freq": (lambda value: value in (None, 1), "1"),
            "moe_router_activation_func": (lambda value: value in (None, "sigmoid"), "sigmoid"),
            "num_nextn_predict_layers": (is_unset, "0"),
            "q_lora_rank": (lambda value: value is None, "none"),
            "routed_expert_hidden_size": (is_unset, "none"),
            "topk_method": (lambda value: value in (None, "noaux_tc"), "noaux_tc"),
            "use_grouped_topk": (is_true_or_unset, "true"),
        },
    ),
)
