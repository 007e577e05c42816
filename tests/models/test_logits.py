"""Logits and greedy tokens against transformers, for every architecture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from milepost.models import Decoder, LoadOptions, load_model
from tests.batches import Part, Pools, build_pools
from tests.checkpoints import CHECKPOINTS, save
from tests.numbers import relative_error

PAGES = [3, 1, 5, 2]


def random_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 101, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens[None], use_cache=False).logits[0]


def step(model: Decoder, pools: Pools, tokens: Tensor, begin: int, end: int) -> Tensor:
    """Logits of the tokens [begin, end) of one sequence that lives in slot 1; one token decodes."""
    part = Part(
        pages=PAGES,
        start=begin,
        length=end - begin,
        slot_in=1 if begin else 0,
        slot_out=1,
    )
    is_decode = end - begin == 1 and begin > 0
    ctx = pools.context([part], num_decodes=1 if is_decode else 0)
    return model.compute_logits(model(tokens[begin:end], ctx))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    tokens = random_tokens(150)
    expected = expected_logits(save(name, tmp_path), tokens)
    model, _ = load_model(tmp_path)
    pools = build_pools(model)
    assert relative_error(step(model, pools, tokens, 0, 150), expected) < 1e-4
    assert expected.std() > 0.5, "flat logits would show nothing"


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_logits_in_chunks_and_decode_match_transformers(name: str, tmp_path: Path) -> None:
    tokens = random_tokens(150)
    expected = expected_logits(save(name, tmp_path), tokens)
    model, _ = load_model(tmp_path)
    pools = build_pools(model)
    edges = [0, 64, 100, 147, 148, 149, 150]
    logits = [step(model, pools, tokens, *edge) for edge in pairwise(edges)]
    assert relative_error(torch.cat(logits), expected) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_logits_of_a_mixed_batch_match_transformers(name: str, tmp_path: Path) -> None:
    """Two sequences decode, one resumes from an exported state with shared KV, one is fresh."""
    reference = save(name, tmp_path)
    model, _ = load_model(tmp_path)
    pools = build_pools(model)
    prompts = [random_tokens(count, seed) for seed, count in enumerate((70, 130, 0, 20))]
    prompts[2] = torch.cat((prompts[1][:100], random_tokens(40, seed=9)))
    first = [
        Part(pages=[1, 2], start=0, length=69, slot_in=0, slot_out=1),
        Part(pages=[3, 4, 5], start=0, length=129, slot_in=0, slot_out=2, exports={64: 5}),
    ]
    model(torch.cat((prompts[0][:69], prompts[1][:129])), pools.context(first))
    second = [
        Part(pages=[1, 2], start=69, length=1, slot_in=1, slot_out=1),
        Part(pages=[3, 4, 5], start=129, length=1, slot_in=2, slot_out=2),
        Part(pages=[3, 6, 7], start=64, length=76, slot_in=5, slot_out=3, write_from=64),
        Part(pages=[8], start=0, length=20, slot_in=0, slot_out=4),
    ]
    begins = (69, 129, 64, 0)
    tokens = [prompt[begin:] for prompt, begin in zip(prompts, begins, strict=True)]
    logits = model.compute_logits(model(torch.cat(tokens), pools.context(second, 2)))
    for part, prompt, begin in zip(
        logits.split([len(each) for each in tokens]), prompts, begins, strict=True
    ):
        assert relative_error(part, expected_logits(reference, prompt)[begin:]) < 1e-4


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_next_dense", "qwen3_5", "qwen3_5_moe", "qwen3_5_multimodal"]
)
def test_greedy_tokens_match_transformers_in_float64(name: str, tmp_path: Path) -> None:
    reference = save(name, tmp_path, torch.float64)
    tokens = random_tokens(90)
    expected = reference.generate(
        input_ids=tokens[None],
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[0]
    model, _ = load_model(tmp_path)
    assert model.dtype == torch.float64
    pools = build_pools(model)
    for begin, end in ((0, 37), (37, 64)):
        step(model, pools, tokens, begin, end)
    begin = 64
    while len(tokens) < len(expected):
        logits = step(model, pools, tokens, begin, len(tokens))
        begin = len(tokens)
        tokens = torch.cat((tokens, logits[-1:].argmax(-1)))
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_errs_no_more_than_transformers(state_dtype: torch.dtype, tmp_path: Path) -> None:
    tokens = random_tokens(100)
    reference = save("qwen3_5", tmp_path)
    exact = expected_logits(reference, tokens)
    expected = expected_logits(reference.to(torch.bfloat16), tokens)
    model, _ = load_model(tmp_path, LoadOptions(dtype="bfloat16"))
    pools = build_pools(model, state_dtype=state_dtype)
    edges = [0, 64, 99, 100]
    logits = torch.cat([step(model, pools, tokens, *edge) for edge in pairwise(edges)])
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, exact) < 1.25 * relative_error(expected, exact)


def test_packed_weights_err_no_more_than_others(tmp_path: Path) -> None:
    tokens = random_tokens(90)
    wide = {"hidden_size": 512, "linear_value_head_dim": 96, "num_attention_heads": 15}
    save("qwen3_next", tmp_path, attention_bias=True, head_dim=32, **wide)

    def computed(model: Decoder) -> Tensor:
        pools = build_pools(model)
        edges = [0, 75, 89, 90]
        return torch.cat([step(model, pools, tokens, *edge) for edge in pairwise(edges)])

    exact = computed(load_model(tmp_path, LoadOptions(dtype="float64"))[0])
    model, _ = load_model(tmp_path)
    plain = computed(model)
    model.pack()
    for layer in model.layers:
        (out,) = layer.blocks[0].parts[0].out.weights
        assert out.values is None or not torch.backends.mkldnn.is_available()
    assert relative_error(computed(model), exact) < 1.5 * relative_error(plain, exact) < 1e-3
