"""Tiny random checkpoints of every architecture, saved as transformers saves them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers  # its models are loaded when they are named, which takes seconds

from tests.alice import alice, write_alice
from tests.lfm3 import lfm3, lfm3_vl
from tests.ling import ling, write_ling
from tests.qwen4 import qwen4
from tests.wrapped import INTERN, minicpm, write_intern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


def _qwen3_next(**changes: Any) -> PreTrainedModel:
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**(_COMMON | _EXPERTS | changes))
    )


def _qwen3_5(**changes: Any) -> PreTrainedModel:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**(_COMMON | changes)))


def _qwen3_5_moe(**changes: Any) -> PreTrainedModel:
    return transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**(_COMMON | _EXPERTS | changes))
    )


def _olmo_hybrid(**changes: Any) -> PreTrainedModel:
    sizes = {name: size for name, size in _COMMON.items() if name != "head_dim"}
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.OlmoHybridForCausalLM(
        transformers.OlmoHybridConfig(**(sizes | special | changes))
    )


def _bamba(**changes: Any) -> PreTrainedModel:
    sizes = {name: _COMMON[name] for name in _COMMON if not name.startswith(("linear", "head"))}
    own = {
        "attn_layer_indices": [1],
        "mamba_n_heads": 12,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "num_hidden_layers": 3,
    }
    return remembering(
        transformers.BambaForCausalLM(transformers.BambaConfig(**(sizes | own | changes)))
    )


def _nemotron_h(**changes: Any) -> PreTrainedModel:
    own = {
        "chunk_size": 64,
        "hidden_size": 48,
        "hybrid_override_pattern": "ME*-ME",
        "initializer_range": 0.2,
        "mamba_head_dim": 8,
        "mamba_num_heads": 16,
        "max_position_embeddings": 1024,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 40,
        "n_routed_experts": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 16,
        "vocab_size": 101,
    }
    sizes = {name: _COMMON[name] for name in ("head_dim", "intermediate_size")}
    config = transformers.NemotronHConfig(**(sizes | own | changes))
    model = remembering(transformers.NemotronHForCausalLM(config))
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            # It takes the bounds of how time steps began for those of what they may be.
            layer.mixer.time_step_limit = tuple(config.time_step_limit)
        elif layer.block_type == "moe":
            layer.mixer.gate.e_score_correction_bias.normal_(std=0.2)
    return model


def _nemotron_h_omni(**changes: Any) -> PreTrainedModel:
    """Nemotron's text part beside a tower, which is not run; transformers may be too old for it."""
    names = "NemotronH_Omni_Reasoning_V3_Config", "NemotronH_Omni_Reasoning_V3"
    if not all(hasattr(transformers, name) for name in names):
        pytest.skip(f"transformers {transformers.__version__} has no {names[1]}")
    vision = {
        "model_type": "radio",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_img_size": 64,
        "patch_size": 4,
        "video_temporal_patch_size": 2,
    }
    text = _nemotron_h(**changes)
    config = getattr(transformers, names[0])(
        text_config=text.config,
        vision_config=vision,
        vision_hidden_size=16,
        projector_hidden_size=8,
    )
    model = getattr(transformers, names[1])(config)
    model.language_model = text
    return model


def _granitemoehybrid(**changes: Any) -> PreTrainedModel:
    sizes = {name: _COMMON[name] for name in _COMMON if not name.startswith(("linear", "head"))}
    own = {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "logits_scaling": 2.0,
        "mamba_chunk_size": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 12,
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "residual_multiplier": 0.6,
        "shared_intermediate_size": 80,
    }
    config = transformers.GraniteMoeHybridConfig(**(sizes | own | changes))
    return remembering(transformers.GraniteMoeHybridForCausalLM(config))


def _falcon_h1(**changes: Any) -> PreTrainedModel:
    sizes = {name: _COMMON[name] for name in _COMMON if not name.startswith(("linear", "head"))}
    own = {
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.7,
        "embedding_multiplier": 1.7,
        "head_dim": 8,
        "key_multiplier": 0.6,
        "lm_head_multiplier": 1.3,
        "mamba_chunk_size": 64,
        "mamba_d_ssm": 72,
        "mamba_d_state": 16,
        "mamba_n_heads": 12,
        "mlp_multipliers": [0.8, 1.4],
        "num_hidden_layers": 2,
        "ssm_in_multiplier": 1.1,
        "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.8],
        "ssm_out_multiplier": 0.9,
    }
    return remembering(
        transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**(sizes | own | changes)))
    )


def remembering(model: PreTrainedModel) -> PreTrainedModel:
    """What transformers begins with forgets all within a few tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data.fill_(-1.5)
    return model


def _lfm2(**changes: Any) -> PreTrainedModel:
    sizes = {name: _COMMON[name] for name in _COMMON if not name.startswith(("linear", "head"))}
    own = {
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "tie_word_embeddings": False,
    }
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**(sizes | own | changes)))


def _lfm2_vl(**changes: Any) -> PreTrainedModel:
    """LFM2 beside parts that are not run."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    outer = {"projector_hidden_size": 8, "tie_word_embeddings": False}
    config = transformers.Lfm2VlConfig(
        text_config=_lfm2(**changes).config,
        vision_config={"model_type": "siglip2_vision_model", "num_hidden_layers": 1, **vision},
        **outer,
    )
    return transformers.Lfm2VlForConditionalGeneration(config)


def _lfm2_moe(**changes: Any) -> PreTrainedModel:
    sizes = {name: _COMMON[name] for name in _COMMON if not name.startswith(("linear", "head"))}
    own = {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "moe_intermediate_size": 20,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    model = transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**(sizes | own | changes)))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.randn(buffer.shape))
    return model


def _kimi_linear(**changes: Any) -> PreTrainedModel:
    """Its configuration as transformers names things, and saves them."""
    own = {
        "kv_lora_rank": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 12,
        "linear_num_heads": 3,
        "max_position_embeddings": 1024,
        "moe_intermediate_size": 20,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 6,
        "num_local_experts": 6,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
    }
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "initializer_range",
    )
    sizes = {name: _COMMON[name] for name in names}
    model = transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(**(sizes | own | changes))
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(torch.randn(tensor.shape))
        if name.endswith("A_log"):
            # What transformers begins with forgets all within a few tokens.
            tensor.data.copy_(torch.linspace(-3, 0.5, tensor.numel()).view(tensor.shape))
    return model


def _ling(**changes: Any) -> PreTrainedModel:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = {name: _COMMON[name] for name in (*names, "initializer_range")}
    return ling(**sizes | changes)


def _multimodal() -> PreTrainedModel:
    config = transformers.Qwen3_5Config(text_config=_COMMON, vision_config=_VISION)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _multimodal_moe(**changes: Any) -> PreTrainedModel:
    text = _COMMON | _EXPERTS | changes
    vision = _VISION | {"out_hidden_size": text["hidden_size"]}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


CHECKPOINTS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_next_tied": lambda: _qwen3_next(tie_word_embeddings=True),
    "qwen3_next_dense": lambda: _qwen3_next(num_experts=0),
    "qwen3_next_sparse_step": lambda: _qwen3_next(decoder_sparse_step=2, mlp_only_layers=[1]),
    "qwen3_next_plain_weights": lambda: _qwen3_next(norm_topk_prob=False),
    "qwen3_next_one_head": lambda: _qwen3_next(
        num_attention_heads=5,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        attention_bias=True,
        linear_conv_kernel_dim=3,
    ),
    "qwen3_next_no_shared_expert": lambda: _qwen3_next(shared_expert_intermediate_size=0),
    "qwen3_next_joint": lambda: _qwen3_next(shared_expert_intermediate_size=20),
    "olmo_hybrid": _olmo_hybrid,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "nemotron_h_omni": _nemotron_h_omni,
    "granitemoehybrid": _granitemoehybrid,
    "granitemoehybrid_as_built": _granitemoehybrid,
    "falcon_h1": _falcon_h1,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _ling,
    "bailing_hybrid_tiny": lambda **changes: _ling(**{"q_lora_rank": 18} | changes),
    "alice_ai": lambda **changes: alice(_COMMON | _EXPERTS, **changes),
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm2_vl": _lfm2_vl,
    "lfm3": lambda **changes: lfm3(_COMMON, **changes),
    "lfm3_vl": lambda **changes: lfm3_vl(_COMMON, **changes),
    "qwen4_exp": lambda **changes: qwen4(_COMMON | _EXPERTS, **changes),
    "qwen3_5": _qwen3_5,
    "qwen3_5_tied": lambda: _qwen3_5(tie_word_embeddings=True, num_key_value_heads=6),
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_multimodal": _multimodal,
    "qwen3_5_moe_multimodal": _multimodal_moe,
    INTERN: _multimodal_moe,
    "minicpmv4_6": lambda **changes: minicpm("4_6", **_COMMON | changes),
    "minicpmv4_7": lambda **changes: minicpm("4_7", **_COMMON | changes),
}
"""Name -> a model with random weights, from a fixed seed once `build` has called it."""


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """The model of this name; norms, biases and decays are random too, so that none is missed.

    `changes` to the configuration are taken by the plain ones, named after their architecture.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = CHECKPOINTS[name](**changes).eval()
    randomise(model)
    return model.to(dtype)


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Makes norms, biases and decays random too, so that none is missed."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    model.set_experts_implementation("eager")


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Build the model and save it in `folder`."""
    model = build(name, dtype, **changes)
    write(model, name, folder)
    return model


def write(model: PreTrainedModel, name: str, folder: Path) -> None:
    """Save a model that `build` returned under this name."""
    # OLMo-Hybrid's own format has convolutions cut in thirds, whatever their sizes.
    is_own = name not in ("olmo_hybrid", "granitemoehybrid_as_built")
    own = {} if is_own else {"save_original_format": False}
    model.save_pretrained(folder, **own)
    if name == INTERN:
        write_intern(folder)
    if name.startswith("bailing_hybrid"):
        write_ling(folder)
    if name == "alice_ai":
        write_alice(model, folder)
