"""OLMo-Hybrid, an architecture of known parts, beside transformers: logits of whatever a prefill or
an answer resumes from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.models import load_model
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, open_llm
from tests.models.resuming import Resuming

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CONFIGURATIONS = {
    "positions": {"rope_parameters": ROPE},
    "no_positions": {
        "attention_bias": True,
        "linear_allow_neg_eigval": False,
        "linear_conv_kernel_dim": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "odd_sizes": {
        "hidden_size": 40,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_key_head_dim": 7,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_value_head_dim": 5,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_hidden_layers": 2,
        "rope_parameters": ROPE,
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    reference = save("olmo_hybrid", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


def test_both_dialects_load_alike(tmp_path):
    save("olmo_hybrid", tmp_path)
    before = dict(load_model(tmp_path)[0].named_parameters())
    file = tmp_path / "model.safetensors"
    save_file(dict(_published(load_file(file))), file)
    after = dict(load_model(tmp_path)[0].named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], parameter) for name, parameter in before.items())


def _published(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Under OLMo-core's names."""
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if "conv1d" in name:
            for letter, part in zip("qkv", tensor.split((24, 24, 72)), strict=True):
                yield name.replace("conv1d", f"{letter}_conv1d"), part
        elif layer < 3:
            own = name.replace("input_layernorm", "attention_layer_norm")
            yield own.replace("post_attention_layernorm", "feedforward_layer_norm"), tensor
        else:
            yield name, tensor
