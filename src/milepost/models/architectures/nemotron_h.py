"""Nemotron-H and Nemotron-3: each layer is one mixer or feed-forward: Mamba2, attention without
positions, a squared ReLU MLP, or experts of these, chosen by sigmoids and latent in the larger
models.

Time steps are bounded by `time_step_limit`, as in the published code. transformers 5 bounds them by
`time_step_min`, which is about their initial values in training, so its answers differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.kernels.products import Scores
from milepost.layers.attention import Attention
from milepost.layers.experts import ExpertNames
from milepost.layers.mamba2 import Mamba2, Mamba2Shapes
from milepost.layers.mlp import MLP
from milepost.layers.moe import ExpertShapes, MoE
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, Part, ResidualBlock
from milepost.models.architecture import Architecture, attention_shapes, is_unset, norm_of
from milepost.models.decoder import DecoderParts
from milepost.models.names import take_same
from milepost.models.radio import radio_tower

_NAMES = ExpertNames(
    projections=("up_proj", "down_proj"),
    stacked=("experts.up_proj", "experts.down_proj"),
    shared="shared_experts",
    shared_projections=("up_proj", "down_proj"),
)


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    layers, eps = [], config.layer_norm_epsilon
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        norm = norm_of(config, inner.under("norm"), eps=eps)
        part = _PARTS[layer_type](config, inner.under("mixer"))
        layers.append(Layer(ResidualBlock(part, pre=norm)))
    return DecoderParts(layers=layers, norm=norm_of(config, scope.under("norm_f"), eps=eps))


def _mamba2(config: PreTrainedConfig, scope: ModuleScope) -> Part:
    shapes = Mamba2Shapes(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        num_groups=config.n_groups,
        state_size=config.ssm_state_size,
        conv_width=config.conv_kernel,
        chunk_size=config.chunk_size,
        norm_eps=config.layer_norm_epsilon,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        time_step_limit=tuple(config.time_step_limit),
    )
    return Mamba2(shapes, scope)


def _attention(config: PreTrainedConfig, scope: ModuleScope) -> Part:
    shapes = attention_shapes(config, norm_eps=config.layer_norm_epsilon, bias=False)
    return Attention(shapes, scope, rotary=None)


def _mlp(config: PreTrainedConfig, scope: ModuleScope) -> Part:
    return MLP(config.hidden_size, config.intermediate_size, scope, ("up_proj", "down_proj"))


def _experts(config: PreTrainedConfig, scope: ModuleScope) -> Part:
    shapes = ExpertShapes(
        num_experts=config.n_routed_experts,
        num_chosen=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        shared_size=config.moe_shared_expert_intermediate_size,
        normalise=config.norm_topk_prob,
        scores=Scores(
            kind="sigmoid",
            num_groups=config.n_group,
            num_groups_chosen=config.topk_group,
            scale=config.routed_scaling_factor,
            gates_shared=False,
        ),
        has_bias=True,
        latent_size=config.moe_latent_size or 0,
    )
    return MoE(config.hidden_size, shapes, scope, _NAMES)


_PARTS = {
    "linear_attention": _mamba2,
    "full_attention": _attention,
    "mlp": _mlp,
    "moe": _experts,
}


_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _settle(settings: dict[str, Any]) -> None:
    """Converts a pattern of letters to a list of layer types, whose length is the model's depth."""
    kinds = settings.get("layers_block_type")
    if kinds is not None:
        settings["layers_block_type"] = [_OLDER.get(kind, kind) for kind in kinds]
    pattern = settings.pop("hybrid_override_pattern", None)
    if pattern is None:
        return
    unknown = sorted(set(pattern) - set(_LETTERS))
    if unknown:
        raise UnsupportedModelError(
            f"hybrid_override_pattern has {unknown[0]!r}; supported are {', '.join(_LETTERS)}"
        )
    listed = [_LETTERS[letter] for letter in pattern]
    take_same(settings, "layers_block_type", "hybrid_override_pattern", listed)


_PLAIN = Architecture(
    model_types=("nemotron_h",),
    build=_parts,
    layer_types=tuple(_PARTS),
    aliases={
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max",
        "mamba_dt_limit": "time_step_limit",
        "mamba_dt_init_floor": "time_step_floor",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_chunk_size": "chunk_size",
    },
    spellings=(("layers_block_type", "hybrid_override_pattern"),),
    settle=_settle,
    requirements={
        "hidden_act": (is_unset, "none"),
        "mlp_hidden_act": (lambda value: value == "relu2", "relu2"),
        "mamba_hidden_act": (lambda value: value in ("silu", "swish"), "silu"),
        "attention_bias": (is_unset, "false"),
        "mlp_bias": (is_unset, "false"),
        "mamba_proj_bias": (is_unset, "false"),
        "residual_in_fp32": (is_unset, "false"),
        "n_shared_experts": (lambda value: value == 1, "1"),
    },
    prefixes=("backbone", "model"),
    embedding="embeddings",
)
ARCHITECTURES = (
    _PLAIN,
    replace(  # Nemotron-3-Nano-Omni and 3.5-Super-VL
        _PLAIN,
        model_types=("nemotron_h_omni",),
        text_types=("nemotron_h",),
        prefixes=("language_model.backbone", "language_model.model"),
        output_path="language_model",
        head_at="language_model.mtp",
        tower=radio_tower,
        tower_path="vision_model",
        skipped=(
            r"(mlp1|multi_modal_projector|vision_final_layernorm)\.",
            r"vision_model\.(radio_model\.)?(input_conditioner\.|summary_idxs)",
            r"(sound_encoder|sound_projection|audio_tower|embed_audio)\.",
        ),
    ),
)
