"""Bamba: Mamba2 layers, and attention with rotary positions on half of each head; a feed-forward
after each."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.attention import Attention
from milepost.layers.mamba2 import Mamba2
from milepost.layers.mlp import MLP
from milepost.layers.parameters import ModuleScope
from milepost.layers.rotary import Rotary
from milepost.models.architecture import (
    Architecture,
    attention_shapes,
    is_unset,
    mamba2_shapes,
    norm_of,
    plain_layer,
)
from milepost.models.decoder import DecoderParts
from milepost.models.names import take_same

_NORMS = "input_layernorm", "pre_ff_layernorm"


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    _refuse_other_rotary(config)
    rotary = Rotary(config, scope.device)
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        mixer = (
            Attention(attention_shapes(config), inner.under("self_attn"), rotary=rotary)
            if layer_type == "full_attention"
            else Mamba2(mamba2_shapes(config), inner.under("mamba"))
        )
        mlp = MLP(config.hidden_size, config.intermediate_size, inner.under("feed_forward"))
        layers.append(plain_layer(config, inner, mixer, mlp, norms=_NORMS))
    return DecoderParts(layers=layers, norm=norm_of(config, scope.under("final_layernorm")))


def _refuse_other_rotary(config: PreTrainedConfig) -> None:
    """Refuses `attn_rotary_emb` if it is not half of a head: transformers rotates half, whatever
    the published setting says."""
    size, half = getattr(config, "attn_rotary_emb", None), attention_shapes(config).head_dim // 2
    if size not in (None, half):
        raise UnsupportedModelError(
            f"attn_rotary_emb={size} is not supported; supported is {half}, half of a head"
        )


_LAYERS = ("attn_layer_indices", "layer_types", "layers_block_type")


def _settle(settings: dict[str, Any]) -> None:
    """Converts lists of layers to indices of attention layers. Refuses a rotary share other than
    half of a head."""
    for name in _LAYERS[1:]:
        kinds = settings.pop(name, None)
        if kinds is not None:
            indices = [i for i, kind in enumerate(kinds) if kind in ("attention", "full_attention")]
            take_same(settings, _LAYERS[0], name, indices)
    share = (settings.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share not in (None, 0.5):
        raise UnsupportedModelError(
            f"partial_rotary_factor={share} is not supported; supported is 0.5, half of a head"
        )


ARCHITECTURES = (
    Architecture(
        model_types=("bamba",),
        build=_parts,
        requirements={"mlp_bias": (is_unset, "false")},
        spellings=(_LAYERS,),
        settle=_settle,
    ),
)
