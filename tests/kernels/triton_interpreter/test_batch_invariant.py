"""The fused kernels with `batch_invariant`: what stands beside a request, and where its prompt is
cut, changes no bit."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.attention.portable import prepare
from tests.engines import ask_all, greedy, logprobs, save_tiny, tokens
from tests.kernels.triton_interpreter.fused import run_fused

SHAPES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LENGTHS, NUM_ANSWERED = (70, 5), (2, 4)


def test_answers_beside_others_and_alone(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode beside a prefill takes its own kernel, not the prefill's."""
    monkeypatch.setattr(prepare, "_FEW_TOKENS", 4)
    tiny = save_tiny(tmp_path, "qwen3_next", torch.float32, **SHAPES)
    llm = tiny.open(
        batch_invariant=True,
        enable_prefix_caching=False,
        num_pages=64,
        num_slots=16,
        page_size=64,
        max_num_batched_tokens=71,
    )
    run_fused(llm)
    prompts = [tokens(length, length) for length in LENGTHS]
    wishes = [greedy(count) for count in NUM_ANSWERED]
    alone = [ask_all(llm, [own], [wish])[0] for own, wish in zip(prompts, wishes, strict=True)]
    together = ask_all(llm, prompts[::-1], wishes[::-1])[::-1]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert logprobs(one) == logprobs(other)
