"""AliceAI: Qwen3-Next's layers with Kimi Delta Attention in place of Gated DeltaNet. Experts are
chosen by corrected sigmoids. Attention over blocks of layers replaces the residual sum."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig, PreTrainedConfig, Qwen3NextConfig

from milepost.errors import UnsupportedModelError
from milepost.kernels.products import Scores
from milepost.layers.attention import Attention
from milepost.layers.kda import KDA, KDAShapes
from milepost.layers.moe import ExpertShapes, MoE
from milepost.layers.norm import StreamNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, Part, ResidualBlock
from milepost.layers.residual import ResidualAttention
from milepost.layers.rotary import Rotary
from milepost.models.architecture import (
    NORMS,
    Architecture,
    attention_shapes,
    is_unset,
    norm_of,
    only,
)
from milepost.models.architectures.qwen3_next import QWEN_SPELLINGS, expert_shapes, settle_qwen
from milepost.models.decoder import DecoderParts


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    rotary, delta, experts = Rotary(config, scope.device), _kda_shapes(config), _experts(config)
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        mixer: Part
        if layer_type == "full_attention":
            shapes = attention_shapes(config, norm="each", norm_offset=1.0, gate="entries")
            mixer = Attention(shapes, inner.under("self_attn"), rotary=rotary)
        else:
            mixer = KDA(delta, inner.under("linear_attn"))
        mlp = MoE(config.hidden_size, experts, inner.under("mlp"))
        layers.append(_layer(config, inner, index, (mixer, mlp)))
    norm = norm_of(config, scope.under("norm"), offset=1.0)
    last = ResidualAttention(norm, scope.under("attnres_final"), "res")
    return DecoderParts(layers=layers, norm=last)


def _layer(
    config: PreTrainedConfig, scope: ModuleScope, index: int, parts: tuple[Part, Part]
) -> Layer:
    mixer, mlp = parts
    first, norm = (norm_of(config, scope.under(name), offset=1.0) for name in NORMS)
    # The first layer reads the embedding, the only source.
    pre: StreamNorm = ResidualAttention(first, scope, "attn_res") if index > 0 else first
    is_first = index % config.block_attn_res_block_size == 0
    between = ResidualAttention(norm, scope, "mlp_res", opens=is_first)
    return Layer(ResidualBlock(mixer, pre=pre), ResidualBlock(mlp, pre=between))


def _kda_shapes(config: PreTrainedConfig) -> KDAShapes:
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads, config.linear_value_head_dim
    if (heads, size) != values:
        raise UnsupportedModelError(
            f"linear_num_value_heads={values[0]} and linear_value_head_dim={values[1]} are not "
            f"those of keys, {heads} and {size}: other values are not supported"
        )
    return KDAShapes(
        hidden_size=config.hidden_size,
        num_heads=heads,
        head_dim=size,
        conv_width=config.linear_conv_kernel_dim,
        norm_eps=config.rms_norm_eps,
    )


def _experts(config: PreTrainedConfig) -> ExpertShapes:
    shapes = expert_shapes(config, normalise=config.norm_topk_prob)
    return replace(shapes, scores=Scores(kind="sigmoid", norm_eps=1e-20), has_bias=True)


class AliceAIConfig(Qwen3NextConfig):
    """The configuration, which transformers has no class for, with the published defaults."""

    model_type = "alice_ai"
    vocab_size: int = 129_024
    max_position_embeddings: int = 262_144
    linear_num_key_heads: int = 32
    block_attn_res_block_size: int = 4
    router_score_function: str = "sigmoid"
    router_bias_correction: bool = True
    kda_allow_negative_eigenvalues: bool = False
    mtp_num_hidden_layers: int = 1


AutoConfig.register("alice_ai", AliceAIConfig)
ARCHITECTURES = (
    Architecture(
        model_types=("alice_ai",),
        build=_parts,
        spellings=QWEN_SPELLINGS,
        settle=settle_qwen,
        requirements={
            "attention_bias": (is_unset, "false"),
            "kda_allow_negative_eigenvalues": (is_unset, "false"),
            "mlp_only_layers": (is_unset, "none"),
            "num_experts": (bool, "one or more"),
            **only(
                decoder_sparse_step=1, router_bias_correction=True, router_score_function="sigmoid"
            ),
        },
    ),
)
