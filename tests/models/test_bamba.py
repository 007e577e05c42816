"""Bamba, Mamba2 layers beside attention, against transformers: logits of whatever a prefill or an
answer resumes from."""

from __future__ import annotations

import pytest
import torch

from milepost.errors import UnsupportedModelError
from milepost.kernels.recurrent import choose_chunk
from milepost.models import LoadOptions, load_model
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, open_llm, tokens
from tests.models.resuming import Resuming

CONFIGURATIONS = {
    "one_group": {},
    "groups": {
        "attention_bias": True,
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_n_groups": 8,
        "mamba_n_heads": 16,
        "mamba_proj_bias": True,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "time_step_limit": (0.05, 0.25),
    },
    "odd_sizes": {
        "attn_layer_indices": [0],
        "hidden_size": 40,
        "mamba_chunk_size": 100,
        "mamba_d_conv": 2,
        "mamba_d_state": 7,
        "mamba_n_groups": 5,
        "mamba_n_heads": 5,
        "num_attention_heads": 5,
        "num_hidden_layers": 2,
        "num_key_value_heads": 5,
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    reference = save("bamba", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


def test_the_grid_is_the_models_chunk(tmp_path):
    reference = save("bamba", tmp_path, vocab_size=VOCAB_SIZE, mamba_chunk_size=128)
    llm = open_llm(tmp_path, max_num_batched_tokens=160, page_size=16, num_slots=32)
    assert llm.llm_engine.scheduler.cache.grid == 128
    run = Resuming.beside(llm, reference).run
    run(tokens(300), 0)
    run(tokens(300), 256)
    shared = tokens(100, 2)
    run([*shared, *tokens(60, 3)], 0)
    run([*shared, *tokens(60, 4)], 0)
    run([*shared, *tokens(60, 5)], 100)  # a whole chunk would give up all of it


@pytest.mark.parametrize(("size", "chunk"), [(5, 64), (64, 64), (100, 64), (128, 128), (512, 128)])
def test_a_chunk_is_one_that_kernels_run(size, chunk):
    assert choose_chunk(size) == chunk


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_rotary_emb": 8},
        {"mlp_bias": True},
        {"mamba_d_conv": 1},
        {"mamba_n_groups": 5},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes, tmp_path):
    config = save("bamba", tmp_path).config
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        load_model(tmp_path, LoadOptions(load_format="dummy"))


def test_dummy_weights_keep_states_in_range(tmp_path):
    save("bamba", tmp_path, vocab_size=VOCAB_SIZE)
    llm = open_llm(tmp_path, load_format="dummy", num_slots=8)
    (state, *_) = llm.llm_engine.runner.executor.model.layers[0].blocks[0].parts
    assert (state.rate < 0).all()
    assert torch.isfinite(state.dt_bias).all()
