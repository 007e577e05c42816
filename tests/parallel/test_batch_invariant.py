"""Two ranks in the bitwise mode: hits and batches have the bits of cold runs on two ranks."""

from __future__ import annotations

import pytest
import torch

from milepost.engine.assembly import setup
from tests.engine.drawing import run
from tests.engines import ask, cached, save_tiny, tokens
from tests.parallel.team import ThreadTeam
from tests.parallel.test_equality import SIZES
from tests.small_tokenizer import train_tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_have_the_same_bits(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "Team", ThreadTeam)
    tiny = save_tiny(tmp_path, "qwen3_next", torch.float32, **SIZES)
    options = {"batch_invariant": True, "tensor_parallel_size": 2, "dtype": dtype}
    prompts = [[*tokens(100), *tokens(length, length)] for length in (29, 60, 93, 200)]
    with tiny.open(max_num_batched_tokens=70, max_num_seqs=6, **options) as llm:
        alone = [ask(llm, each, cache_salt=str(index))[0] for index, each in enumerate(prompts)]
        for _ in range(2):
            together = ask(llm, *prompts, cache_salt="together")
            for one, other in zip(alone, together, strict=True):
                assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert min(cached(together)) >= 64


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))]
)
def test_drawn_traffic_on_two_ranks(seed, tmp_path, monkeypatch):
    """All features together: each token's bits are those of a cold run alone, on two ranks too."""
    monkeypatch.setattr(setup, "Team", ThreadTeam)
    tokenizer = train_tokenizer()
    folder = tmp_path / "model"
    vocab_size = len(tokenizer) + len(tokenizer) % 2
    save_tiny(folder, "qwen3_next", torch.float32, vocab_size=vocab_size, **SIZES)
    tokenizer.save_pretrained(folder)
    dtype = "bfloat16" if seed % 2 else "float32"
    modes = {"batch_invariant": True, "dtype": dtype, "tensor_parallel_size": 2}
    with pytest.MonkeyPatch.context() as patches:  # undone before the answers are compared
        run(seed, folder, "qwen3_next", tmp_path / "kept", patches, num_requests=8, **modes)
