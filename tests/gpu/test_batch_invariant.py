"""With `batch_invariant`, results on a GPU are the same bits whatever is computed beside them: rows
of each operation, and answers of whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from milepost import LLM
from milepost.engine.outputs import CompletionOutput, RequestOutput
from milepost.kernels import norm
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Epilogue, multiply_heads
from milepost.runner.device import DeviceExecutor
from tests.engines import (
    ask_all,
    cached,
    logprobs,
    open_llm,
    prompt,
    sampled,
    save_tiny,
    tokens,
)
from tests.gpu.test_families import COMMON, FAMILIES
from tests.kernels.invariance import (
    FORMS,
    SHAPES,
    compare_experts,
    compare_products,
    make_weight,
)
from tests.kernels.mixers import (
    REAL,
    Batch,
    fused_decode,
    fused_prefill,
    make_pools,
    make_projected,
    make_weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_ROWS = (1, 2, 7, 16, 33, 64, 65, 500)
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "initializer_range": 0.05,
}
"""Shapes that all kernels for Hopper serve."""
DENSE = {name: size for name, size in WIDE.items() if "expert" not in name and "moe" not in name}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_next", WIDE, {}),
    "experts in FP8": ("qwen3_next", WIDE, {"quantization": "fp8"}),
    "dense": ("qwen3_5", DENSE, {}),
    "dense in FP8": ("qwen3_5", DENSE, {"quantization": "fp8"}),
    "FP8 pages": ("qwen3_5", DENSE | {"head_dim": 256}, {"kv_cache_dtype": "fp8"}),
    "Mamba2": ("nemotron_h", COMMON | FAMILIES["nemotron_h"], {}),
    "KDA": ("kimi_linear", COMMON | FAMILIES["kimi_linear"], {}),
    "short convolutions": ("lfm2_moe", COMMON | FAMILIES["lfm2_moe"], {}),
    "portable": ("qwen3_next", WIDE, {"hopper_kernels": False}),
}
LENGTHS = (700, 3, 64, 1, 2500, 65, 129, 300, 17, 1500, 40, 512)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_products(form: str, shape: tuple[int, int]) -> None:
    assert list(compare_products(make_weight(form, *shape))) == []


def test_rows_of_logits_in_float32() -> None:
    assert list(compare_products(make_weight("raw", 264, 2048), Epilogue.FLOAT32)) == []


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_experts(form: str) -> None:
    assert list(compare_experts(form)) == []


def test_rows_of_norms_heads_and_likelihoods() -> None:
    hidden, delta = torch.randn(2, 1000, 4096, device="cuda").bfloat16()
    scale = torch.rand(4096, device="cuda")
    heads = torch.randn(1000, 16, 128, device="cuda").bfloat16()
    weight = torch.randn(16, 128, 512, device="cuda").bfloat16()
    logits = torch.randn(1000, 151_935, device="cuda")

    def make(num: int) -> dict[str, torch.Tensor]:
        own = slice(num)
        how = {"order": SumOrder.FIXED}
        return {
            "norm": norm.add_norm(hidden[own], delta[own], scale, 1e-6, **how)[1],
            "post norm": torch.nn.functional.rms_norm(hidden[own].float(), (4096,), eps=1e-6),
            "heads": multiply_heads(heads[own], weight, **how),
            "likelihoods": logits[own].log_softmax(-1),
        }

    whole = make(1000)
    different = [
        (num, name)
        for num in NUM_ROWS
        for name, found in make(num).items()
        if not torch.equal(found, whole[name][:num])
    ]
    assert different == []


@pytest.mark.parametrize("cuts", [(64, 4936), (640, 1280, 3080), (4160, 840)], ids=str)
def test_prefills_of_the_delta_rule_wherever_they_are_cut(cuts: tuple[int, ...]) -> None:
    """On the grid; some pieces are long enough for kernels of many tokens."""
    weights = make_weights(REAL, torch.bfloat16, "cuda")
    projected = make_projected(REAL, sum(cuts), torch.bfloat16, "cuda")
    outputs, states = [], []
    for lengths in ((sum(cuts),), cuts):
        pools, parts, start = make_pools(REAL, 4, torch.bfloat16, "cuda"), [], 0
        for length in lengths:
            own = Batch(starts=[start], lengths=[length], slot_in=[3 if start else 0], slot_out=[3])
            parts.append(
                fused_prefill(REAL, projected[start : start + length], weights, pools, own)
            )
            start += length
        outputs.append(torch.cat(parts))
        states.append(pools.recurrent[3])
    assert torch.equal(*states)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 33])
def test_decodes_of_the_delta_rule_beside_any_number(num: int) -> None:
    weights = make_weights(REAL, torch.bfloat16, "cuda")
    projected = make_projected(REAL, 64, torch.bfloat16, "cuda")
    outputs = []
    for count in (64, num):
        pools = make_pools(REAL, 67, torch.bfloat16, "cuda")
        slots = list(range(3, 3 + count))
        own = Batch(starts=[], lengths=[], slot_in=[1] * count, slot_out=slots)
        outputs.append(
            (fused_decode(REAL, projected[:count], weights, pools, own), pools.recurrent)
        )
    (many, states), (few, own_states) = outputs
    assert torch.equal(many[:num], few)
    assert torch.equal(states[3 : 3 + num], own_states[3 : 3 + num])


@pytest.mark.parametrize("name", MODELS)
def test_answers_depend_on_their_prompts_alone(name: str, tmp_path: Path) -> None:
    """Alone and cold; behind hits and cold, with so few at a time that prompts stand beside
    answers in most steps."""
    llm = _open(tmp_path, name)
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    wishes = [sampled(8 + 3 * number) for number in range(len(LENGTHS))]
    alone = [
        ask_all(llm, [prompt], [wish])[0] for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    hits = ask_all(llm, prompts, wishes)
    llm.reset_prefix_cache()
    cold = ask_all(llm, prompts, wishes)
    assert [_differing(alone, others) for others in (hits, cold)] == [[], []]


@pytest.mark.parametrize("name", ["experts", "dense in FP8", "Mamba2", "KDA", "portable"])
def test_drafts_change_no_bit(name: str, tmp_path: Path) -> None:
    prompts = [tokens(length, seed) * 6 for seed, length in enumerate((9, 20, 33, 50))]
    wishes = [sampled(40, temperature=0.3)] * len(prompts)
    plain = ask_all(_open(tmp_path, name), prompts, wishes)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    drafting = ask_all(_open(tmp_path, name, speculative_config=drafts), prompts, wishes)
    assert _differing(plain, drafting) == []


def test_latent_attention_of_large_steps_has_more_items_than_a_grid_has_columns(
    tmp_path: Path,
) -> None:
    """With 32 heads an item has two tokens, and a step of 8,192 tokens room for 65,536 items."""
    shapes = {"num_attention_heads": 32, "num_key_value_heads": 32}
    save_tiny(tmp_path, "kimi_linear", torch.float32, **(COMMON | FAMILIES["kimi_linear"] | shapes))
    llm = _open(tmp_path, "KDA")
    prompts = [tokens(length, seed) for seed, length in enumerate((3000, 3100))]
    alone = [ask_all(llm, [each], [sampled(4)])[0] for each in prompts]
    llm.reset_prefix_cache()
    assert _differing(alone, ask_all(llm, prompts, [sampled(4)] * 2)) == []


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="models follow many rows on Hopper alone",
)
@pytest.mark.parametrize(
    "lengths",
    [
        (700, 930, 1000),
        pytest.param(
            (300,), marks=pytest.mark.xfail(strict=True, reason="not found: its cold run is short")
        ),
    ],
)
@pytest.mark.parametrize("name", ["experts", "experts in FP8", "dense"])
def test_by_default_a_hit_has_the_bits_of_its_cold_run_where_attention_is_not_cut(
    name: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Of the first token of answers: `models.many` says which models add up few rows as many. Hits
    leave 34 to 60 tokens."""
    llm = _open(tmp_path, name, batch_invariant=False)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    params = sampled(1)

    def ask() -> list[RequestOutput]:
        return [llm.generate([prompt(each)], params, use_tqdm=False)[0] for each in prompts]

    cold, hits = ask(), ask()
    assert cached(hits) == [(length - 34) // 64 * 64 for length in lengths]
    assert _differing(*([each.outputs[0] for each in outputs] for outputs in (cold, hits))) == []


def _open(folder: Path, name: str, **others: Any) -> LLM:
    family, shapes, options = MODELS[name]
    if not (folder / "config.json").exists():
        save_tiny(folder, family, torch.float32, **shapes)
    slots = {} if family.startswith("lfm2") else {"num_slots": 64}
    llm = open_llm(
        folder,
        device="cuda",
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=5,
        page_size=64,
        num_pages=512,
        **({"batch_invariant": True} | slots | options | others),
    )
    assert isinstance(llm.llm_engine.runner.executor, DeviceExecutor)
    return llm


def _differing(expected: list[CompletionOutput], found: list[CompletionOutput]) -> list[int]:
    """Numbers of the answers whose tokens or log-probabilities differ."""
    pairs = zip(map(_bits, expected), map(_bits, found), strict=True)
    return [number for number, (one, other) in enumerate(pairs) if one != other]


def _bits(completion: CompletionOutput) -> list[tuple[int, float]]:
    return list(zip(completion.token_ids, logprobs(completion), strict=True))
