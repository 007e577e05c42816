"""The engine on a GPU beside the reference on a CPU: logits, texts, hits, graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from milepost import LLM, SamplingParams
from milepost.engine.setup import EMBEDDED_MODEL
from milepost.models import load_model
from milepost.runner import device, plain
from milepost.runner.device import DeviceExecutor
from milepost.runner.plain import PlainExecutor
from tests.engines import Tiny, ask, cached, greedy, num_held, save_tiny, tokens
from tests.numbers import relative_error
from tests.shared import memory_of, serve, share_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SOURCE = Path(device.__file__).read_text(encoding="utf-8")
SHAPES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "initializer_range": 0.05,
}
BOUNDS = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative error of the logits. In bfloat16 random weights spread rounding further than trained
ones do: there the bound is that of the plain kernels in the same type."""
ROUNDING = 1.3
"""Error in bfloat16 beside that of the plain kernels, at most."""


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def tiny(request, tmp_path_factory) -> Tiny:
    shapes = SHAPES if request.param == "qwen3_next" else _without_experts(SHAPES)
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(folder, request.param, torch.float32, **shapes)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Tiny:
    """Of shapes for which all kernels for Hopper run."""
    shapes = SHAPES | {"linear_key_head_dim": 128}
    return save_tiny(tmp_path_factory.mktemp("wide"), "qwen3_next", torch.float32, **shapes)


@pytest.fixture(params=BOUNDS)
def dtype(request) -> str:
    return request.param


@pytest.fixture
def seen(monkeypatch) -> list[torch.Tensor]:
    """Logits of the rows that sampled, step by step."""
    found: list[torch.Tensor] = []
    choose = device.choose

    def note(logits, rows, best=None):
        found.append(logits.float().cpu())
        return choose(logits, rows, best)

    for module in (device, plain):
        monkeypatch.setattr(module, "choose", note)
    return found


@pytest.mark.parametrize("length", [1, 63, 200, 600])
def test_logits(tiny, dtype, seen, length):
    """Of a prompt and of each token of the answer, beside one pass of the reference."""
    errors = []
    for is_plain in (False, True):
        seen.clear()
        (output,) = ask(_open(tiny, dtype, is_plain=is_plain), tokens(length, 2), params=greedy(8))
        expected = _reference(tiny, dtype, [*tokens(length, 2), *output.outputs[0].token_ids[:-1]])
        assert torch.cat(seen).isfinite().all()
        errors.append(relative_error(torch.cat(seen), expected[length - 1 :]))
    assert errors[0] < (BOUNDS[dtype] if dtype == "float32" else ROUNDING * errors[1])


@pytest.mark.parametrize("length", [40, 200, 400])
def test_logits_of_trained_weights(dtype, seen, length):
    llm = LLM(device="cuda", dtype=dtype, max_num_seqs=8, gpu_memory_utilization=0.5)
    prompt = llm.get_tokenizer().encode(SOURCE)[:length]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    embedded = Tiny(EMBEDDED_MODEL, torch.float32)
    expected = _reference(embedded, dtype, [*prompt, *output.outputs[0].token_ids[:-1]])
    assert relative_error(torch.cat(seen), expected[length - 1 :]) < BOUNDS[dtype]


def test_hit_gives_the_logits_of_a_cold_run(tiny, dtype, seen):
    llm = _open(tiny, dtype)
    shared, turn = tokens(300), tokens(40, 1)
    (cold,) = ask(llm, [*shared, *turn], params=greedy(1))
    assert cached([cold]) == [0]
    (hit,) = ask(llm, [*shared, *turn], params=greedy(1))
    assert cached([hit]) == [320]
    assert relative_error(seen[1], seen[0]) < _between_runs(dtype)
    # A junction, in a batch with neighbours, and behind it a resume inside a page.
    seen.clear()
    others = [[*shared, *tokens(50, 2)], tokens(90, 3), [*shared, *tokens(9, 4)]]
    outputs = ask(llm, *others, params=greedy(1))
    llm.reset_prefix_cache()
    batched = torch.cat(seen)
    seen.clear()
    for other in others:
        ask(llm, other, params=greedy(1))
        llm.reset_prefix_cache()
    assert len(outputs) == 3
    alone = torch.cat(seen)
    order = torch.cdist(batched, alone).argmin(1)
    assert sorted(order.tolist()) == [0, 1, 2]
    assert relative_error(batched, alone[order]) < _between_runs(dtype)


def test_next_turn_resumes_behind_the_answer(tiny, dtype, seen):
    llm = _open(tiny, dtype)
    prompt = tokens(130)
    (first,) = ask(llm, prompt, params=greedy(21))
    turn = [*prompt, *first.outputs[0].token_ids, *tokens(30, 1)]
    seen.clear()
    (hit,) = ask(llm, turn, params=greedy(1))
    assert cached([hit]) == [150]
    llm.reset_prefix_cache()
    ask(llm, turn, params=greedy(1))
    assert relative_error(seen[0], seen[1]) < _between_runs(dtype)


@pytest.mark.parametrize("changes", [{"enforce_eager": True}, {"async_scheduling": False}])
def test_graphs_and_steps_ahead_change_nothing(tiny, changes, seen):
    prompts = [tokens(40 + 70 * i, i) for i in range(5)]
    ask(_open(tiny, "float32"), *prompts, params=greedy(12))
    whole = list(seen)
    seen.clear()
    ask(_open(tiny, "float32", **changes), *prompts, params=greedy(12))
    for ours, theirs in zip(whole, seen, strict=True):
        assert relative_error(ours, theirs) < BOUNDS["float32"]


def test_many_sequences_under_pressure(tiny, seen):
    """Preemption, eviction and return."""
    llm = _open(tiny, "float32", num_pages=60, num_slots=20)
    prompts = [tokens(150 + 10 * i, i) for i in range(24)]
    outputs = ask(llm, *prompts, params=greedy(60))
    assert num_held(llm) == (0, 0)
    for prompt, output in list(zip(prompts, outputs, strict=True))[::5]:
        answer = output.outputs[0].token_ids
        expected = _reference(tiny, "float32", [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        best = expected.max(-1).values
        chosen = expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert ((best - chosen) < 1e-3 * expected.std()).all()


@pytest.mark.parametrize("pages_each", [1, 6])
def test_one_memory_gives_the_logits_of_two_pools(wide, dtype, pages_each, seen):
    """Bit for bit, whatever lay in the memory before: NaN at first, then what was of the other
    kind."""
    expected = _open(wide, dtype, num_pages=40, num_slots=9)
    answers = [serve(expected), serve(expected)]
    split = list(seen)
    llm = _open(wide, dtype, num_pages=40, num_slots=9)
    model = llm.llm_engine.runner.executor.model

    def make(pools, num_slots):
        before = memory_of(pools).clone()
        executor = DeviceExecutor(model, pools, num_slots=num_slots, max_model_len=2048)
        executor.capture(max_num_seqs=32, max_num_batched_tokens=8192)
        assert torch.equal(memory_of(pools), before), "a step of padding touches nothing"
        return executor

    runner = share_memory(llm, pages_each, make)
    seen.clear()
    first = serve(llm)
    runner.swap()
    assert [first, serve(llm)] == answers
    assert len(split) == len(seen)
    assert all(map(torch.equal, split, seen))
    assert not any(state.recurrent[0].any() for state in runner.pools.states.values())


def test_sampled_answers_repeat(tiny):
    llm = _open(tiny, "bfloat16")
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=5, max_tokens=12)
    first, second = (ask(llm, tokens(80), params=params)[0].outputs[0] for _ in range(2))
    assert len(first.token_ids) == 12
    assert first.token_ids[0] == second.token_ids[0]


def test_embedded_model_answers_as_on_a_cpu():
    prompts = ["def add(a, b):\n    ", "import os\nimport", "class Stack:\n    def push(self"]
    params = SamplingParams(temperature=0, max_tokens=48)
    ours, theirs = (
        LLM(device=name, dtype="float32", max_num_seqs=8).generate(prompts, params, use_tqdm=False)
        for name in ("cuda", "cpu")
    )
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.outputs[0].text == reference.outputs[0].text


def _open(tiny: Tiny, dtype: str, *, is_plain: bool = False, **options) -> LLM:
    """With `is_plain` on the reference kernels."""
    llm = tiny.open(
        device="cuda",
        dtype=dtype,
        max_num_seqs=32,
        max_model_len=2048,
        **({"enforce_eager": True} if is_plain else {}),
        **options,
    )
    runner = llm.llm_engine.runner
    if is_plain:
        runner.executor = PlainExecutor(
            runner.executor.model, runner.pools, num_slots=32, max_model_len=2048
        )
    return llm


def _between_runs(dtype: str) -> float:
    """Two runs of random weights in bfloat16 differ by the rounding of both."""
    return BOUNDS[dtype] if dtype == "float32" else 8 * BOUNDS[dtype]


def _reference(tiny: Tiny, dtype: str, token_ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] on a CPU in float32, of weights as they are in `dtype`."""
    if tiny._model is None:
        tiny._model, _ = load_model(tiny.folder, dtype="float32")
    model = tiny._model
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "norm" not in name:
            weight.data.copy_(weight.to(getattr(torch, dtype)))
    try:
        return tiny.logits(token_ids)
    finally:
        for name, weight in model.named_parameters():
            weight.data.copy_(kept[name])


def _without_experts(shapes: dict[str, object]) -> dict[str, object]:
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return {k: v for k, v in shapes.items() if k not in (*names, "shared_expert_intermediate_size")}
