"""AliceAI, attention over blocks of layers around KDA and gated attention, against the formulas:
logits of whatever a prefill or an answer resumes from."""

from __future__ import annotations

import pytest
import torch

from milepost.errors import UnsupportedModelError
from milepost.models import LoadOptions, load_model
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, answer, ask, greedy, open_llm, tokens
from tests.models.resuming import Resuming, answer_from_host_memory, refuse

CONFIGURATIONS = {
    "usual": {},
    "odd_sizes": {
        "block_attn_res_block_size": 3,
        "head_dim": 8,
        "hidden_size": 40,
        "layer_types": ["full_attention", *["linear_attention"] * 3],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 7,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_value_head_dim": 7,
        "norm_topk_prob": False,
        "num_attention_heads": 5,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
    },
    "joint": {"block_attn_res_block_size": 1, "shared_expert_intermediate_size": 20},
    "one_block": {"block_attn_res_block_size": 8, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_the_formulas_wherever_they_resume(name, tmp_path):
    reference = save("alice_ai", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(tmp_path, max_num_batched_tokens=96, page_size=16, num_slots=32)
    Resuming.beside(llm, reference).run_through_slots()


def test_a_hit_from_host_memory_answers_as_a_cold_run(tmp_path):
    save("alice_ai", tmp_path, torch.float64, vocab_size=VOCAB_SIZE)
    answer_from_host_memory(tmp_path)


def test_the_head_is_left_out_and_refused_by_name(tmp_path):
    save("alice_ai", tmp_path)
    assert load_model(tmp_path)[0].mtp is None
    with pytest.raises(UnsupportedModelError, match="'alice_ai' has no MTP head"):
        load_model(tmp_path, LoadOptions(head="mtp"))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"block_attn_res_block_size": 0},
        {"block_attn_res_block_size": None},
        {"decoder_sparse_step": 2},
        {"kda_allow_negative_eigenvalues": True},
        {"linear_num_value_heads": 6},
        {"linear_value_head_dim": 24},
        {"mlp_only_layers": [1]},
        {"num_experts": 0},
        {"router_bias_correction": False},
        {"router_score_function": "softmax"},
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes, tmp_path):
    save("alice_ai", tmp_path)
    refuse(tmp_path, next(iter(changes)), **changes)


def test_dummy_weights_answer(tmp_path):
    save("alice_ai", tmp_path, vocab_size=VOCAB_SIZE)
    llm = open_llm(tmp_path, load_format="dummy", num_slots=8)
    (output,) = ask(llm, tokens(40), params=greedy(4))
    assert len(set(answer(output))) > 1, "NaN would answer with one token"
