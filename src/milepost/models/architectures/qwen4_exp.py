"""The text part of Qwen3.8-Flash-Next: Gated DeltaNet and sparse attention with an indexer, experts
in every layer. Hyper-connections replace the residual sum, and a few layers add n-gram embeddings
from host memory."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from milepost.errors import UnsupportedModelError
from milepost.layers.attention import Attention
from milepost.layers.gated_delta import SEPARATE, GatedDelta
from milepost.layers.indexer import Indexer, IndexerShapes
from milepost.layers.moe import MoE
from milepost.layers.ngrams import NgramBlock, NgramPart, NgramShapes
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, LayerBlock, Part
from milepost.layers.residual import HyperBlock, HyperConnection
from milepost.layers.rotary import Rotary
from milepost.models.architecture import Architecture, attention_shapes, gated_delta_shapes
from milepost.models.architectures.qwen3_next import QWEN_SPELLINGS, expert_shapes, settle_qwen
from milepost.models.decoder import DecoderParts

_LINEAR, _FULL = "linear_attention", "full_attention"
# Published checkpoints call the layers with an indexer `full_attention`. transformers saves them by
# a name of its own: the first of these up to 5.17, the second since.
_SAVED = "qwen_sparse_attention", "indexed_attention"


def _parts(config: PreTrainedConfig, scope: ModuleScope) -> DecoderParts:
    rotary, experts = (
        Rotary(config, scope.device),
        expert_shapes(config, normalise=config.norm_topk_prob),
    )
    layers, with_ngrams = [], list(config.ple_layer_ids)
    for index, layer_type in enumerate(config.layer_types):
        inner = scope.under(f"layers.{index}")
        blocks: list[LayerBlock] = []
        mixer: Part
        if index + 1 in with_ngrams:
            shapes = _ngram_shapes(config, with_ngrams.index(index + 1))
            blocks.append(NgramBlock(NgramPart(shapes, inner.under("ple"))))
        if layer_type == _LINEAR:
            mixer = GatedDelta(_delta_shapes(config), inner.under("linear_attn"), SEPARATE)
        else:
            mixer = _attention(config, inner.under("self_attn"), rotary)
        mlp = MoE(config.hidden_size, experts, inner.under("mlp"))
        blocks.append(HyperBlock(mixer, _connection(config, inner.under("attn_hyper_connection"))))
        blocks.append(HyperBlock(mlp, _connection(config, inner.under("mlp_hyper_connection"))))
        layers.append(Layer(*blocks))
    norm = _connection(config, scope.under("hyper_connection_mixer"), is_last=True)
    return DecoderParts(layers=layers, norm=norm)


def _attention(config: PreTrainedConfig, scope: ModuleScope, rotary: Rotary) -> Attention:
    indexer = IndexerShapes(
        num_heads=config.indexer_n_heads,
        head_dim=config.indexer_head_dim,
        ratio=config.indexer_compress_ratio,
        budget=config.indexer_budget,
    )
    shapes = attention_shapes(config, norm="each", norm_offset=1.0, gate="entries")
    if indexer.head_dim > shapes.num_kv_heads * shapes.head_dim:
        raise UnsupportedModelError(
            f"indexer_head_dim={indexer.head_dim} is more than num_key_value_heads * head_dim="
            f"{shapes.num_kv_heads * shapes.head_dim}: index keys have a key's room in a page"
        )
    indexer_part = Indexer(indexer, config.hidden_size, scope.under("indexer"), config.rms_norm_eps)
    return Attention(shapes, scope, rotary=rotary, indexer=indexer_part)


def _delta_shapes(config: PreTrainedConfig) -> Any:
    gate = config.output_gate_type or config.hidden_act
    return gated_delta_shapes(config, gates_by_sigmoid=gate == "sigmoid")


def _connection(config: PreTrainedConfig, scope: ModuleScope, **others: bool) -> HyperConnection:
    sizes = config.hidden_size, config.hc_count, config.hc_lowrank
    return HyperConnection(*sizes, scope, eps=config.rms_norm_eps, **others)


def _ngram_shapes(config: PreTrainedConfig, index: int) -> NgramShapes:
    stop = config.eos_token_id
    return NgramShapes(
        hidden_size=config.hidden_size,
        num_streams=config.hc_count,
        embedding_size=config.ple_embed_dim,
        conv_width=config.ple_conv_kernel_size,
        order=config.ngram_size,
        heads_each=config.heads_per_ngram,
        least_rows=config.ngram_vocab_size_base,
        divisor=config.make_ngram_vocab_size_divisible_by,
        num_shards=config.split_ngram_parts,
        vocab_size=config.vocab_size,
        stop_id=stop[0] if isinstance(stop, list) else stop,
        seed=config.seed,
        index=index,
        norm_eps=config.rms_norm_eps,
    )


def _settle(settings: dict[str, Any]) -> None:
    """Gives attention the name that published checkpoints have for it, which every version of
    transformers reads. The other settings are converted as Qwen3-Next's."""
    listed = settings.get("layer_types")
    if isinstance(listed, list):
        settings["layer_types"] = [_FULL if each in _SAVED else each for each in listed]
    settle_qwen(settings)


ARCHITECTURES = (
    Architecture(
        model_types=("qwen4_exp", "qwen4_exp_text"),
        build=_parts,
        layer_types=(_LINEAR, _FULL, *_SAVED),
        spellings=QWEN_SPELLINGS,
        settle=_settle,
        requirements={
            "output_gate_type": (
                lambda value: value in (None, "silu", "swish", "sigmoid"),
                "silu or sigmoid",
            ),
        },
    ),
)
