"""Tiny checkpoints of LFM3 and of LFM3-VL; transformers may be too old to have them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
}


def lfm3(sizes: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """Returns LFM3 with these sizes; skips the test without its class."""
    return _find("Lfm3ForCausalLM")(_config(sizes, changes))


def lfm3_vl(
    sizes: dict[str, Any],
    vision: dict[str, Any] | None = None,
    ids: dict[str, int] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Returns LFM3-VL with this text part, changes of its vision part, and ids of tokens."""
    ids = ids or {}
    outer = {"projector_hidden_size": 8, "tie_word_embeddings": False}
    config = _find("Lfm3VlConfig")(
        text_config=_config(sizes, changes), vision_config=_VISION | (vision or {}), **outer | ids
    )
    return _find("Lfm3VlForConditionalGeneration")(config)


def _config(sizes: dict[str, Any], changes: dict[str, Any]) -> PreTrainedConfig:
    own = {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
        "num_hidden_layers": 5,
        "sliding_window": 40,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "tie_word_embeddings": False,
    }
    sizes = {name: size for name, size in sizes.items() if not name.startswith("linear")}
    return _find("Lfm3Config")(**(sizes | own | changes))


def _find(name: str) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)
