"""Tiny checkpoints of Qwen3.8-Flash-Next, as transformers has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

_SIZES: dict[str, Any] = {
    "eos_token_id": 7,
    "hc_count": 3,
    "hc_lowrank": 10,
    "heads_per_ngram": 2,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 20,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "make_ngram_vocab_size_divisible_by": 12,
    "ngram_vocab_size_base": 50,
    "num_hidden_layers": 4,
    "output_gate_type": "sigmoid",
    "ple_conv_kernel_size": 3,
    "ple_embed_dim": 24,
    "ple_layer_ids": [2, 4],
    "split_ngram_parts": 3,
}


def qwen4(sizes: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """Returns a model with these sizes besides its own; skips the test without its class."""
    if not hasattr(transformers, "Qwen4ExpTextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Qwen4ExpTextConfig")
    config = transformers.Qwen4ExpTextConfig(**(sizes | _SIZES | changes))
    model = transformers.Qwen4ExpForCausalLM(config)
    for name, tensor in model.named_parameters():
        if name.endswith(("ple.conv1d.weight", "ngram_embedding.weight")):
            torch.nn.init.normal_(tensor, std=0.5)  # transformers begins with zeros
    return model
