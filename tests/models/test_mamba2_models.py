"""Granite 4 and Falcon-H1, whose multipliers stand everywhere, against transformers: logits of
whatever a prefill or an answer resumes from."""

from __future__ import annotations

import pytest

from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, open_llm
from tests.models.resuming import Resuming, refuse

CONFIGURATIONS = {
    "granite-experts": {},
    "granite-dense": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_conv_bias": False,
        "mamba_n_groups": 8,
        "mamba_n_heads": 16,
        "num_hidden_layers": 2,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "granite-odd_sizes": {
        "attention_bias": True,
        "hidden_size": 40,
        "layer_types": ["full_attention", "linear_attention"],
        "mamba_d_conv": 2,
        "mamba_d_state": 7,
        "mamba_n_groups": 5,
        "mamba_n_heads": 5,
        "mamba_proj_bias": True,
        "num_attention_heads": 5,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "shared_intermediate_size": 30,
    },
    "falcon": {},
    "falcon-normed": {
        "attention_bias": True,
        "mamba_conv_bias": False,
        "mamba_n_groups": 4,
        "mamba_rms_norm": True,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "falcon-odd_sizes": {
        "hidden_size": 40,
        "mamba_d_conv": 3,
        "mamba_d_ssm": 40,
        "mamba_d_state": 7,
        "mamba_n_groups": 8,
        "mamba_n_heads": 8,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        "num_attention_heads": 5,
        "num_hidden_layers": 1,
        "num_key_value_heads": 5,
    },
}
MODELS = {"granite": "granitemoehybrid", "falcon": "falcon_h1"}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    model = MODELS[name.partition("-")[0]]
    reference = save(model, tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("granitemoehybrid", {"position_embedding_type": "alibi"}),
        ("granitemoehybrid", {"num_experts_per_tok": 7}),
        ("granitemoehybrid", {"mamba_d_conv": 1}),
        ("granitemoehybrid", {"normalization_function": "layernorm"}),
        ("falcon_h1", {"attn_layer_indices": [0]}),
        ("falcon_h1", {"mamba_use_mlp": False}),
        ("falcon_h1", {"mlp_bias": True}),
        ("falcon_h1", {"projectors_bias": True}),
        ("falcon_h1", {"mamba_proj_bias": True}),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(model, changes, tmp_path):
    save(model, tmp_path)
    refuse(tmp_path, next(iter(changes)), **changes)
