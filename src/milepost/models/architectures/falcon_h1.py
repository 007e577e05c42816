"""Falcon-H1: attention and Mamba2 side by side in every layer, then a feed-forward. Its many
multipliers are folded into the adjacent weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.attention import Attention
from milepost.layers.mamba2 import Mamba2, Mamba2Shapes
from milepost.layers.mlp import MLP
from milepost.layers.parameters import ModuleScope
from milepost.layers.rotary import Rotary
from milepost.models.architecture import (
    Architecture,
    attention_shapes,
    is_true_or_unset,
    is_unset,
    mamba2_shapes,
    norm_of,
    plain_layer,
)
from milepost.models.decoder import DecoderParts

_NORMS = "input_layernorm", "pre_ff_layernorm"


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    rotary, size = Rotary(config, scope.device), config.hidden_size
    mamba = mamba2_shapes(
        config, has_norm=config.mamba_rms_norm, norm_before_gate=config.mamba_norm_before_gate
    )
    layers = []
    for index in range(config.num_hidden_layers):
        inner = scope.under(f"layers.{index}")
        mixers = (
            Attention(attention_shapes(config), inner.under("self_attn"), rotary=rotary),
            Mamba2(mamba, inner.under("mamba")),
        )
        mlp = MLP(size, config.intermediate_size, inner.under("feed_forward"))
        layers.append(plain_layer(config, inner, *mixers, mlp, norms=_NORMS))
    return DecoderParts(
        layers=layers,
        norm=norm_of(config, scope.under("final_layernorm")),
        embedding_multiplier=config.embedding_multiplier,
        logits_multiplier=config.lm_head_multiplier,
        factors=_factors(config, mamba),
    )


def _factors(config: PreTrainedConfig, mamba: Mamba2Shapes) -> dict[str, Tensor | float]:
    """Returns factors for a layer's tensors, keyed by the ends of their names."""
    inputs, out = config.attention_in_multiplier, config.attention_out_multiplier
    gate, down = config.mlp_multipliers
    state = mamba.num_groups * mamba.state_size
    sizes = mamba.inner_size, mamba.inner_size, state, state, mamba.num_heads
    outputs = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor(sizes))
    return {
        "self_attn.q_proj.weight": inputs,
        "self_attn.k_proj.weight": inputs * config.key_multiplier,
        "self_attn.k_proj.bias": config.key_multiplier,
        "self_attn.v_proj.weight": inputs,
        "self_attn.o_proj.weight": out,
        "self_attn.o_proj.bias": out,
        "mamba.in_proj.weight": config.ssm_in_multiplier * outputs[:, None],
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
    }


def _settle(settings: dict[str, Any]) -> None:
    """Drops lists of layers, which mean nothing: all layers have both mixers. Refuses any other
    list."""
    for name in ("layer_types", "layers_block_type"):
        kinds = settings.pop(name, None)
        if kinds is not None and kinds != ["hybrid"] * len(kinds):
            raise UnsupportedModelError(f"{name}={kinds!r} is not supported; all are 'hybrid'")


ARCHITECTURES = (
    Architecture(
        model_types=("falcon_h1",),
        build=_parts,
        layer_types=("hybrid",),
        spellings=(("layer_types", "layers_block_type"),),
        settle=_settle,
        requirements={
            "attn_layer_indices": (is_unset, "none: every layer has both mixers"),
            "mamba_proj_bias": (is_unset, "false"),
            "mamba_use_mlp": (is_true_or_unset, "true"),
            "mlp_bias": (is_unset, "false"),
            "projectors_bias": (is_unset, "false"),
        },
    ),
)
